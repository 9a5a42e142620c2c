"use strict";
// Two things only: the switch between light and dark, and readouts on charts. Without it the page is whole.
(() => {
  const root = document.documentElement;
  const KEY = "opteq-theme";

  // Storage may be closed to a page that was opened from a file.
  const remembered = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(KEY, theme); } catch { /* then it is not kept */ } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  // Before anything is drawn, so that the page does not flash in the other colours.
  const chosen = remembered();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

  function themeSwitch(button) {
    const label = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Show this page ${isDark() ? "light" : "dark"}`);
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remember(root.dataset.theme);
      label();
    });
    system.addEventListener("change", label);
    label();
  }

  function readouts(tip) {
    let lit = null;
    const hide = () => {
      tip.hidden = true;
      lit?.classList.remove("on");
      lit = null;
    };
    const show = (words, x, y) => {
      const lines = words.split("\n").map((line, index) => {
        const element = document.createElement(index ? "div" : "b");
        element.textContent = line;
        return element;
      });
      tip.replaceChildren(...lines);
      tip.hidden = false;
      const { width, height } = tip.getBoundingClientRect();
      const left = Math.max(8, Math.min(x - width / 2, root.clientWidth - width - 8));
      const top = y - height - 14 < 8 ? y + 18 : y - height - 14;
      tip.style.transform = `translate(${left}px, ${top}px)`;
    };
    const light = (mark, x, y) => {
      hide();
      lit = mark;
      mark.classList.add("on");
      show(mark.dataset.tip, x, y);
    };

    for (const kind of ["pointermove", "pointerdown"]) {
      document.addEventListener(kind, (event) => {
        const mark = event.target.closest?.("[data-tip]");
        if (mark) light(mark, event.clientX, event.clientY);
        else if (!event.target.closest?.("[data-matrix]")) hide();
      });
    }
    document.addEventListener("scroll", hide, { passive: true });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
    document.querySelectorAll("svg.chart").forEach((chart) => chartKeys(chart, light, hide));
    document.querySelectorAll("[data-matrix]").forEach((grid) => matrix(grid, show, hide));
  }

  // A chart is one stop of the tab key; arrows go from mark to mark inside it.
  function chartKeys(chart, light, hide) {
    const marks = [...chart.querySelectorAll("[data-tip]")];
    const end = marks.length - 1;
    let place = -1;
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -marks.length, End: marks.length };
      if (!(event.key in steps) || end < 0) return;
      event.preventDefault();
      place = Math.max(0, Math.min(place + steps[event.key], end));
      const box = (marks[place].querySelector("line, .bar") || marks[place]).getBoundingClientRect();
      light(marks[place], box.left + box.width / 2, Math.max(box.top, 40));
    });
  }

  function matrix(grid, show, hide) {
    const { classes, cells } = JSON.parse(grid.dataset.matrix);
    const size = classes.length;
    const counts = new Map(cells.map(([row, column, count]) => [row * size + column, count]));
    const cursor = grid.querySelector(".cursor");
    const inside = (place) => Math.max(0, Math.min(Math.floor(place), size - 1));
    let at = [0, -1];
    const read = (row, column) => {
      const box = grid.getBoundingClientRect();
      const side = box.width / size;
      const count = counts.get(row * size + column) || 0;
      at = [row, column];
      cursor.hidden = false;
      cursor.style.cssText = `left:${column * side}px;top:${row * side}px;width:${side}px;height:${side}px`;
      const words = [`${count} ${count === 1 ? "picture" : "pictures"}`, `true ${classes[row]}`];
      show([...words, `predicted ${classes[column]}`].join("\n"), box.left + (column + 0.5) * side, box.top + row * side);
    };
    const leave = () => { cursor.hidden = true; hide(); };
    const point = (event) => {
      const box = grid.getBoundingClientRect();
      const [down, across] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      read(inside(down * size), inside(across * size));
    };
    grid.addEventListener("pointermove", point);
    grid.addEventListener("pointerdown", point);
    grid.addEventListener("pointerleave", leave);
    grid.addEventListener("blur", leave);
    grid.addEventListener("keydown", (event) => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      read(inside(at[0] + move[0]), inside(at[1] + move[1]));
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    themeSwitch(document.getElementById("theme"));
    readouts(document.getElementById("tip"));
  });
})();
