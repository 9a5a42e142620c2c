"use strict";
// The page asks the server for an answer whenever the image or a control changes; the slider only looks at it.
(() => {
  const $ = (id) => document.getElementById(id);
  const canvas = $("canvas");
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const state = { model: null, answer: null, image: null, controls: {}, asked: 0, timer: 0 };

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
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1) : value.toPrecision(3);
  };
  const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

  function fail(message) {
    $("error").textContent = message;
    $("error").hidden = !message;
  }

  // ---- the canvas -------------------------------------------------------------------------------------------------
  function clear() {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    state.image = null;
    state.answer = null;
    state.asked += 1; // an answer that is on its way belongs to what was cleared
    $("answer").replaceChildren(element("p", { class: "note" }, "Draw something first."));
    $("solve").replaceChildren();
    fail("");
  }
  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
  }
  let last = null;
  function stroke(event) {
    const here = place(event);
    pen.strokeStyle = "#fff";
    pen.lineWidth = canvas.width / 9;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(...(last || here));
    pen.lineTo(...here);
    pen.stroke();
    last = here;
  }
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = null;
    stroke(event);
  });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) stroke(event); });
  canvas.addEventListener("pointerup", () => {
    state.image = canvas.toDataURL("image/png");
    ask();
  });
  async function show(file) {
    if (!file) return;
    if (!file.type.startsWith("image/")) return fail(`${file.name} is not an image.`);
    if (file.size > 2.5 * 2 ** 20) return fail(`${file.name} is larger than 2.5 MB.`);
    try {
      const picture = await createImageBitmap(file);
      const scale = Math.max(canvas.width / picture.width, canvas.height / picture.height);
      pen.fillStyle = "#fff";
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(
        picture, (canvas.width - picture.width * scale) / 2, (canvas.height - picture.height * scale) / 2,
        picture.width * scale, picture.height * scale,
      );
    } catch {
      return fail(`${file.name} can't be read as an image.`);
    }
    const reader = new FileReader();
    reader.onload = () => { state.image = reader.result; ask(); };
    reader.readAsDataURL(file);
  }
  for (const kind of ["dragover", "dragleave", "drop"]) {
    canvas.addEventListener(kind, (event) => {
      event.preventDefault();
      canvas.classList.toggle("over", kind === "dragover");
      if (kind === "drop") show(event.dataTransfer.files[0]);
    });
  }

  // ---- the server -------------------------------------------------------------------------------------------------
  function ask() {
    clearTimeout(state.timer);
    state.timer = setTimeout(send, 120); // a slider that is being moved asks once
  }
  async function send() {
    if (!state.image) return;
    const turn = ++state.asked;
    try {
      const response = await fetch("/api/solve", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ image: state.image, ...options() }),
      });
      const answer = await response.json();
      if (turn !== state.asked) return; // a later question is on its way
      if (!response.ok) return fail(answer.error || "The server refused the request.");
      fail("");
      state.answer = answer;
      if (state.model.kind === "denoiser") restored(answer);
      else classified(answer);
    } catch {
      if (turn === state.asked) fail("The server does not answer. Is `opteq play` still running?");
    }
  }
  function options() {
    const values = Object.fromEntries(Object.entries(state.controls).map(([name, one]) => [name, one.value()]));
    if (state.model.kind === "denoiser") return values;
    const { tol, ...factors } = values;
    return tol === undefined ? {} : { tol, factors };
  }
  function control(name, label, low, high, step, initial, convert = (v) => v, text = number) {
    const slider = element("input", { type: "range", min: low, max: high, step, value: initial, id: `control-${name}` });
    const output = element("output", { for: `control-${name}` });
    const value = () => convert(Number(slider.value));
    const tell = () => { output.textContent = text(value()); };
    slider.addEventListener("input", () => { tell(); ask(); });
    const reset = () => { slider.value = initial; tell(); };
    tell();
    state.controls[name] = { value, reset };
    $("controls").append(element("div", { class: "control" }, element("label", { for: `control-${name}` }, label), slider, output));
  }

  // ---- what is shown ----------------------------------------------------------------------------------------------
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
  function picture(source, alternative, caption) {
    return element("figure", {}, element("img", { src: source, alt: alternative }), element("figcaption", {}, caption));
  }
  function probabilities(shares) {
    const order = shares.map((share, index) => [share, index]).sort((a, b) => (b[0] ?? -1) - (a[0] ?? -1)).slice(0, 10);
    return order.map(([share, index]) => bar(state.model.classes[index], share, 1, percent(share), "for"));
  }
  function classified(answer) {
    const { classes } = state.model;
    const proof = answer.evidence;
    const [best, rival] = [classes[answer.predicted], classes[proof.rival]];
    const rows = [...proof.channels.map(([name, share]) => [`channel ${name}`, share]), ["other channels", proof.others], ["bias", proof.bias]];
    const scale = Math.max(...rows.map(([, share]) => Math.abs(share || 0)), 1e-12);
    $("answer").replaceChildren(
      element("div", { class: "pictures" },
        picture(answer.image, "the image as the model sees it", "as the model sees it"),
        picture(proof.pixels, "evidence of every pixel", proof.exact ? "evidence of every pixel" : "evidence, to first order")),
      element("h3", {}, "Classes"), ...probabilities(answer.probabilities),
      element("h3", {}, `Evidence for ${best} against ${rival}: ${signed(proof.difference)}`),
      ...rows.map(([name, share]) => bar(name, share, scale, signed(share), share >= 0 ? "for" : "against")),
      element("p", { class: "note" }, "The shares add up to the difference of the two logits."),
    );
    solved(answer);
  }
  function solved(answer) {
    const target = $("solve");
    if (!answer.steps.length) {
      target.replaceChildren(element("p", { class: "note" }, "This model has no single equilibrium layer to look into."));
      return;
    }
    const end = answer.steps.length - 1;
    const slider = element("input", { type: "range", min: 0, max: end, step: 1, value: end, id: "step" });
    const label = element("output", { for: "step" });
    const view = element("div", {});
    const look = () => {
      const at = Number(slider.value);
      const step = answer.steps[at];
      label.textContent = `${at} of ${end}`;
      const terms = step.terms === null ? [] : Object.entries(step.terms);
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
        element("h3", {}, "Classes at this step"), ...probabilities(step.probabilities).slice(0, 4),
      ].filter((part) => part !== null));
    };
    slider.addEventListener("input", look);
    const how = answer.solve;
    target.replaceChildren(
      element("p", { class: "note" }, `${how.method}: ${how.status}, ${how.steps} steps, residual ${number(how.residual)}, tolerance ${number(how.tol)}. Below: plain steps.`),
      element("div", { class: "control" }, element("label", { for: "step" }, "plain step"), slider, label),
      view,
    );
    look();
  }
  function restored(answer) {
    $("answer").replaceChildren(element("div", { class: "pictures" },
      picture(answer.before, "before", "before"), picture(answer.after, "after", "after")));
    const facts = [["steps", answer.steps], ["relative residual", number(answer.residual)],
      ["energy minimised", answer.minimised ? "yes" : "no, within the steps allowed"]];
    if (answer.psnr !== null) facts.push(["PSNR", `${answer.psnr.toFixed(2)} dB`]);
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
      element("p", { class: "note" }, "From the weights alone, for every image, with all terms as trained."),
      element("dl", {}, ...rows.flatMap(([key, name]) => [
        element("dt", {}, `${name}: ${word(found[key])}`), element("dd", {}, found.reasons[key] || ""),
      ])),
    );
  }

  // ---- start ------------------------------------------------------------------------------------------------------
  async function start() {
    clear();
    const model = await (await fetch("/api/model")).json();
    state.model = model;
    $("name").textContent = model.name;
    document.title = `${model.name} · opteq play`;
    $("about").textContent = model.kind === "denoiser" ? "a denoiser" : `${model.model}, ${model.classes.length} classes`;
    if (model.kind === "denoiser") {
      control("sigma", "noise level", 0, 75, 1, 25, (v) => v, (v) => `${v} / 255`);
      control("strength", "prior", -1, 1, 0.05, 0, (v) => 10 ** v, (v) => `${v.toFixed(2)} ×`);
      control("tol", "tolerance", -6, -2, 0.5, -4, (v) => 10 ** v);
      certificate(null);
      return;
    }
    if (model.tol !== null) {
      const usual = Math.log10(model.tol || 1e-3);
      control("tol", "tolerance", -6, -0.5, 0.25, Math.round(4 * usual) / 4, (v) => 10 ** v);
      for (const term of model.terms) control(term, term, 0, 4, 0.05, 1, (v) => v, (v) => `${v.toFixed(2)} ×`);
    }
    certificate(model.certificate);
  }
  $("clear").addEventListener("click", clear);
  $("file").addEventListener("change", (event) => { show(event.target.files[0]); event.target.value = ""; });
  $("reset").addEventListener("click", () => { Object.values(state.controls).forEach((one) => one.reset()); ask(); });
  start().catch(() => fail("The server does not answer. Is `opteq play` still running?"));
})();
