"use strict";
// What the page shows of an answer; page.js asks for it.
const show = (() => {
  const $ = (id) => document.getElementById(id);
  // Text goes in as text, never as markup: names of classes come from files.
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  function drawn(name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
  const number = (value) => {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : value.toPrecision(3);
    return text.replace(/^-/, "−");
  };
  const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

  function bar(name, value, scale, text, style) {
    const svg = drawn("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    const width = scale ? Math.min(100, (100 * Math.abs(value || 0)) / scale) : 0;
    svg.append(drawn("rect", { x: 0, y: 0, width, height: 8, class: style }));
    return element("div", { class: "bar" }, element("span", { title: name }, name), svg, element("span", {}, text));
  }
  function curve(values, at, log, label) {
    const good = values.map((value) => (value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value));
    const known = good.filter((value) => value !== null);
    if (known.length < 2) return null;
    const low = Math.min(...known);
    const high = Math.max(...known);
    const across = (index) => (100 * index) / (good.length - 1);
    const points = good
      .map((value, index) => (value === null ? null : `${across(index)},${38 - (36 * (value - low)) / (high - low || 1)}`))
      .filter((point) => point !== null);
    const svg = drawn("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "curve", role: "img", "aria-label": label });
    svg.append(drawn("polyline", { points: points.join(" ") }));
    svg.append(drawn("line", { x1: across(at), x2: across(at), y1: 0, y2: 40 }));
    return svg;
  }
  function captioned(source, alternative, caption) {
    return element("figure", {}, element("img", { src: source, alt: alternative }), element("figcaption", {}, caption));
  }
  function probabilities(model, shares) {
    const order = shares.map((share, index) => [share, index]).sort((a, b) => (b[0] ?? -1) - (a[0] ?? -1)).slice(0, 10);
    return order.map(([share, index]) => [index, bar(model.classes[index], share, 1, percent(share), "for")]);
  }
  // A click on a class shows the evidence against it.
  function choices(model, answer, choose) {
    return probabilities(model, answer.probabilities).map(([index, row]) => {
      if (index === answer.predicted) return row;
      const name = model.classes[index];
      const chosen = element("button", {
        type: "button", class: "choice", "aria-pressed": String(index === answer.evidence.rival), title: `Evidence against ${name}`,
      }, row);
      chosen.addEventListener("click", () => choose(index));
      return chosen;
    });
  }
  function classified(model, answer, choose) {
    const { classes } = model;
    const proof = answer.evidence;
    const [best, rival] = [classes[answer.predicted], classes[proof.rival]];
    const rows = [...proof.channels.map(([name, share]) => [`channel ${name}`, share]), ["other channels", proof.others], ["bias", proof.bias]];
    const scale = Math.max(...rows.map(([, share]) => Math.abs(share || 0)), 1e-12);
    $("answer").replaceChildren(
      element("div", { class: "images" },
        captioned(answer.image, "the image as the model sees it", "as the model sees it"),
        captioned(proof.pixels, "evidence of every pixel", proof.exact ? "evidence of every pixel" : "evidence, to first order")),
      element("h3", {}, "Classes: choose one to see the evidence against it"), ...choices(model, answer, choose),
      element("h3", {}, `Evidence for ${best} against ${rival}: ${signed(proof.difference)}`),
      ...rows.map(([name, share]) => bar(name, share, scale, signed(share), share >= 0 ? "for" : "against")),
      element("p", { class: "note" }, "The shares add up to the difference of the two logits."),
    );
    solved(model, answer);
  }
  function solved(model, answer) {
    const target = $("solve");
    if (!answer.steps.length) {
      target.replaceChildren(element("p", { class: "note" }, "This model has no single equilibrium layer to look into."));
      return;
    }
    const end = answer.steps.length - 1;
    const shown = document.getElementById("step"); // a slider in the middle stays there when the answer changes
    const at = shown && Number(shown.value) < Number(shown.max) ? Math.min(Number(shown.value), end) : end;
    const slider = element("input", { type: "range", min: 0, max: end, step: 1, value: at, id: "step" });
    const label = element("output", { for: "step" });
    const view = element("div", {});
    const look = () => {
      const at = Number(slider.value);
      const step = answer.steps[at];
      label.textContent = `${at} of ${end}`;
      const changes = (name) => answer.steps.some((one) => one.terms && one.terms[name] !== 0); // ReLU's penalty never does
      const terms = step.terms === null ? [] : Object.entries(step.terms).filter(([name]) => changes(name));
      view.replaceChildren(...[
        step.state ? element("figure", {}, element("img", { id: "state", src: step.state, alt: `state after ${at} steps` }),
          element("figcaption", {}, "channels of the state")) : null,
        element("h3", {}, `Objective: ${step.objective === null ? "none" : number(step.objective)}`),
        curve(answer.steps.map((one) => one.objective), at, false, "objective after every step"),
        element("h3", {}, `Relative residual: ${number(step.residual)}`),
        curve(answer.steps.map((one) => one.residual), at, true, "relative residual after every step"),
        terms.length ? element("h3", {}, "Terms") : null,
        terms.length ? element("table", {}, element("tbody", {}, ...terms.map(([name, value]) =>
          element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, number(value)))))) : null,
        element("h3", {}, "Classes at this step"), ...probabilities(model, step.probabilities).slice(0, 4).map(([, row]) => row),
      ].filter((part) => part !== null));
    };
    slider.addEventListener("input", look);
    const how = answer.solve;
    target.replaceChildren(
      element("p", { class: "note" }, `${how.method}: ${how.status}, ${how.steps} steps, residual ${number(how.residual)}, tolerance ${number(how.tol)}. The slider goes through plain steps, without acceleration.`),
      element("div", { class: "control" }, element("label", { for: "step" }, "plain step"), slider, label),
      view,
    );
    look();
  }
  function restored(answer) {
    $("answer").replaceChildren(element("div", { class: "images" },
      captioned(answer.before, "before", "before"), captioned(answer.after, "after", "after")));
    const facts = [["steps", answer.steps], ["estimated error", `${number(answer.error)}, tolerance ${number(answer.tol)}`],
      ["energy minimised", answer.minimised ? "yes" : "no, within the steps allowed"]];
    if (answer.psnr !== null) facts.push(["PSNR before, after", answer.psnr.map((one) => `${one.toFixed(2)} dB`).join(", ")]);
    $("solve").replaceChildren(element("table", {}, element("tbody", {}, ...facts.map(([name, value]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, String(value)))))));
  }
  function certificate(found) {
    const target = $("certificate");
    if (!found || found.error) {
      target.replaceChildren(element("p", { class: "note" }, found ? found.error : "There is none for this model."));
      return;
    }
    const word = (value) => (value === null ? "unknown" : value === true ? "yes" : value === false ? "no" : number(value));
    const rows = [["exists", "An equilibrium exists"], ["unique", "It is unique"], ["contraction", "Contraction factor"], ["lipschitz", "Lipschitz constant"]];
    target.replaceChildren(
      element("h3", {}, "For every image"),
      element("p", { class: "note" }, "From the weights alone, with all terms as trained."),
      element("dl", {}, ...rows.flatMap(([key, name]) => [
        element("dt", {}, `${name}: ${word(found[key])}`), element("dd", {}, found.reasons[key] || ""),
      ])),
      found.symbols ? element("p", { class: "note" }, `Here ${found.symbols}.`) : "",
    );
  }

  function point(found) {
    const title = element("h3", {}, "At the equilibrium of this image");
    if (found.error) return $("point").replaceChildren(title, element("p", { class: "note" }, `Unknown: ${found.error}.`));
    if (!found.converged) return $("point").replaceChildren(title, element("p", { class: "note" }, "No equilibrium was found, so there is nothing to certify."));
    const bound = (value) => (value === null ? "unknown" : `at most ${number(value)}`);
    const rows = [
      ["A strict minimum", found.strict_minimum ? "yes" : "not known"],
      ["Local rate of plain steps", bound(found.contraction)],
      ["Local Lipschitz constant", bound(found.lipschitz)],
      ["Radius of its affine piece", found.radius === null ? "unknown: the equilibrium is not piecewise affine" : number(found.radius)],
    ];
    const distances = [
      ["Proved: not nearer than", found.proved === null ? `unknown: ${found.unproved}` : number(found.proved)],
      ["Estimated, to first order", found.estimated === null ? "none" : number(found.estimated)],
    ];
    const table = (lines) => element("table", {}, element("tbody", {}, ...lines.map(([name, value]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))));
    const share = found.radius && found.norm ? ` It is ${number((100 * found.radius) / found.norm)} % of the norm of that input.` : "";
    const words = `Within that radius the equilibrium is an affine function of the layer's input, so the evidence above is exact.${share}`;
    $("point").replaceChildren(title, table(rows),
      element("p", { class: "note" }, `${found.radius === null ? "" : `${words} `}All of it holds with probability ${found.probability}.`),
      element("h3", {}, "The nearest image with another answer"), table(distances),
      element("p", { class: "note" }, "Euclidean distance; one pixel from black to white is 1. The proof counts the worst case of every part, so it is small."));
  }
  return { $, element, number, classified, restored, certificate, point };
})();
