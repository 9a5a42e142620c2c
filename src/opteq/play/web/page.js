"use strict";
// The page asks the server for an answer whenever the image or a control changes; the slider only looks at it.
(() => {
  const { $, element, number } = show;
  const canvas = $("canvas");
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const state = { model: null, image: null, rival: null, controls: {}, asked: 0, timer: 0, busy: false, certifying: null };

  function fail(message) {
    $("error").textContent = message;
    $("error").hidden = !message;
  }

  // ---- the canvas -------------------------------------------------------------------------------------------------
  function clear() {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    state.image = null;
    state.rival = null;
    state.asked += 1; // an answer that is on its way belongs to what was cleared
    state.certifying?.abort();
    $("answer").replaceChildren(element("p", { class: "note" }, "Draw something first."));
    $("solve").replaceChildren();
    $("point").replaceChildren();
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
    state.image = centred().toDataURL("image/png");
    state.rival = null;
    ask();
  });
  // A drawing fills the image from top to bottom, as images of digits do, wherever it was drawn.
  function centred() {
    if (state.model && state.model.kind === "denoiser") return canvas;
    const { width, height } = canvas;
    const { data } = pen.getImageData(0, 0, width, height);
    let [left, right, top, bottom] = [width, -1, height, -1];
    for (let place = 0; place < width * height; place += 1) {
      if (data[4 * place] < 32) continue;
      const [x, y] = [place % width, Math.floor(place / width)];
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
    if (right < 0) return canvas;
    const side = Math.max(right - left, bottom - top) + 1;
    const made = document.createElement("canvas");
    made.width = made.height = width;
    const copy = made.getContext("2d");
    copy.fillStyle = "#000";
    copy.fillRect(0, 0, width, height);
    copy.drawImage(canvas, (left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2, side, side, 0, 0, width, height);
    return made;
  }
  async function open(file) {
    if (!file) return;
    if (!file.type.startsWith("image/")) return fail(`${file.name} is not an image.`);
    let bitmap;
    try {
      bitmap = await createImageBitmap(file);
      const scale = Math.max(canvas.width / bitmap.width, canvas.height / bitmap.height);
      pen.fillStyle = "#fff";
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(
        bitmap, (canvas.width - bitmap.width * scale) / 2, (canvas.height - bitmap.height * scale) / 2,
        bitmap.width * scale, bitmap.height * scale,
      );
    } catch {
      return fail(`${file.name} can't be read as an image.`);
    }
    state.rival = null;
    if (file.size > 2.5 * 2 ** 20) { // a large photo is made smaller here: requests are limited in size
      const scale = Math.min(1, 800 / Math.max(bitmap.width, bitmap.height));
      const made = document.createElement("canvas");
      [made.width, made.height] = [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
      made.getContext("2d").drawImage(bitmap, 0, 0, made.width, made.height);
      state.image = made.toDataURL("image/png");
      return ask();
    }
    const reader = new FileReader();
    reader.onload = () => { state.image = reader.result; ask(); };
    reader.readAsDataURL(file);
  }
  for (const kind of ["dragover", "dragleave", "drop"]) {
    canvas.addEventListener(kind, (event) => {
      event.preventDefault();
      canvas.classList.toggle("over", kind === "dragover");
      if (kind === "drop") open(event.dataTransfer.files[0]);
    });
  }

  // ---- the server -------------------------------------------------------------------------------------------------
  function ask() {
    clearTimeout(state.timer);
    state.timer = setTimeout(send, 120); // a slider that is being moved asks once
  }
  async function send() {
    if (!state.image || !state.model) return;
    const turn = ++state.asked;
    state.certifying?.abort(); // the server passes over a question that was given up
    if (state.busy) return; // the question on its way asks again when it comes back: they never pile up
    state.busy = true;
    const slow = setTimeout(() => { $("busy").textContent = "Computing …"; }, 400);
    const answer = await post("/api/solve", { ...options(), ...(state.rival === null ? {} : { rival: state.rival }) });
    state.busy = false;
    clearTimeout(slow);
    $("busy").textContent = "";
    if (turn !== state.asked) return send(); // something has changed since
    if (!answer) return;
    fail("");
    if (state.model.kind === "denoiser") return show.restored(answer);
    show.classified(state.model, answer, (rival) => { state.rival = rival; ask(); });
    if (!answer.steps.length) return;
    $("point").replaceChildren(element("p", { class: "note" }, "At this image: computing …"));
    state.certifying = new AbortController();
    const found = await post("/api/certificate", options(), state.certifying.signal);
    if (found && turn === state.asked) show.point(found);
  }
  async function post(address, asked, signal) {
    const turn = state.asked;
    try {
      const body = JSON.stringify({ image: state.image, ...asked });
      const response = await fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
      const answer = await response.json();
      if (response.ok) return answer;
      if (turn === state.asked) fail(answer.error || "The server refused the request.");
    } catch {
      if (turn === state.asked) fail("The server does not answer. Is `opteq play` still running?");
    }
    return null;
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

  function toggle(name, label, initial) {
    const box = element("input", { type: "checkbox", id: `control-${name}` });
    const reset = () => { box.checked = initial; };
    reset();
    box.addEventListener("input", ask);
    state.controls[name] = { value: () => box.checked, reset };
    $("controls").append(element("div", { class: "control" }, element("label", { for: `control-${name}` }, label), box));
  }

  // ---- start ------------------------------------------------------------------------------------------------------
  async function start() {
    clear();
    const model = await (await fetch("/api/model")).json();
    state.model = model;
    document.body.className = model.kind;
    $("name").textContent = model.name;
    document.title = `${model.name} · opteq play`;
    $("about").textContent = model.kind === "denoiser" ? model.model : `${model.model}, ${model.classes.length} classes`;
    if (model.kind === "denoiser") {
      control("sigma", "noise level", 0, 75, 1, model.sigma, (v) => v, (v) => `${v} / 255`);
      control("strength", "prior", -1, 1, 0.05, 0, (v) => 10 ** v, (v) => `${v.toFixed(2)} ×`);
      control("tol", "tolerance", -6, -2, 0.5, -4, (v) => 10 ** v);
      toggle("add_noise", "add noise", true);
      show.certificate(model.certificate);
      return;
    }
    if (model.tol !== null) {
      const usual = Math.log10(model.tol || 1e-3);
      control("tol", "tolerance", -6, -0.5, 0.25, Math.round(4 * usual) / 4, (v) => 10 ** v);
      for (const term of model.terms) control(term, term, 0, 4, 0.05, 1, (v) => v, (v) => `${v.toFixed(2)} ×`);
    }
    show.certificate(model.certificate);
  }
  $("clear").addEventListener("click", clear);
  $("file").addEventListener("change", (event) => { open(event.target.files[0]); event.target.value = ""; });
  $("reset").addEventListener("click", () => { Object.values(state.controls).forEach((one) => one.reset()); ask(); });
  start().catch(() => fail("The server does not answer. Is `opteq play` still running?"));
})();
