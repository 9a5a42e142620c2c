// Runs page.js with a small stand-in for a browser's document: draws, moves sliders, drops files, and prints what is
// shown after each of these as JSON.
// Usage: node play_page.js page.js model.json answer.json
"use strict";
const { readFileSync } = require("fs");
const [script, model, answer] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));

class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], attributes: {}, listeners: {}, width: 256, height: 256, value: "", hidden: false });
    this.classList = { toggle() {} };
    this.words = null;
  }
  set textContent(words) { this.words = String(words); }
  get textContent() {
    return this.words ?? this.children.map((child) => (typeof child === "string" ? child : child.textContent)).join(" ");
  }
  setAttribute(key, value) {
    this.attributes[key] = String(value);
    if (key === "value") this.value = String(value);
    if (key === "id") elements[value] = this;
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; this.words = null; }
  addEventListener(kind, listener) { (this.listeners[kind] ??= []).push(listener); }
  fire(kind, event = {}) { (this.listeners[kind] || []).forEach((one) => one({ target: this, preventDefault() {}, ...event })); }
  getContext() { return new Proxy({}, { get: () => () => {}, set: () => true }); }
  toDataURL() { return "data:image/png;base64,drawn"; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 256, height: 256 }; }
  setPointerCapture() {}
}

const elements = {};
const sent = [];
let reply = { ok: true, body: answer };
global.document = {
  getElementById: (id) => (elements[id] ??= new Element(id)),
  createElement: (name) => new Element(name),
  createElementNS: (_space, name) => new Element(name),
};
global.fetch = async (address, request) => {
  if (request) sent.push(JSON.parse(request.body));
  return address === "/api/model" ? { ok: true, json: async () => JSON.parse(model) } : { ok: reply.ok, json: async () => JSON.parse(reply.body) };
};
const wait = (time) => new Promise((done) => setTimeout(done, time));
const shown = () => Object.fromEntries(["name", "error", "answer", "solve", "certificate"].map((id) => [id, elements[id].textContent]));

(async () => {
  const log = {};
  eval(script);
  await wait(30);
  for (const kind of ["pointerdown", "pointermove", "pointerup"]) elements.canvas.fire(kind, { clientX: 9, clientY: 9, buttons: 1 });
  await wait(250);
  log.drawn = shown();
  elements.step.value = "0";
  elements.step.fire("input");
  log.first_step = shown().solve;
  elements["control-coupling"].value = "0.5";
  for (let times = 0; times < 5; times += 1) elements["control-coupling"].fire("input");
  await wait(250);
  elements.canvas.fire("drop", { dataTransfer: { files: [{ name: "a.txt", type: "text/plain", size: 9 }] } });
  log.wrong_file = shown().error;
  reply = { ok: false, body: '{"error": "refused by the server"}' };
  elements.canvas.fire("pointerup");
  await wait(250);
  log.refused = shown().error;
  elements.clear.fire("click");
  log.cleared = shown();
  console.log(JSON.stringify({ ...log, sent }));
})();
