// A long list to choose one entry from; only the rows that can be seen exist.

import { h } from "./dom.js";

const ROW = 52;
const SPARE = 6; // rows beyond both edges

/** `choose(entry)` is called on every choice; `row(entry)` makes the content of a row. */
export function picker(choose, row) {
  const sheet = h("div", { class: "sheet", role: "presentation" });
  const element = h("div", { class: "picker", role: "listbox", id: "samples-list", tabindex: 0, "aria-label": "Samples" }, sheet);
  let entries = [];
  let at = -1;

  function draw() {
    const first = Math.max(0, Math.floor(element.scrollTop / ROW) - SPARE);
    const last = Math.min(entries.length, Math.ceil((element.scrollTop + element.clientHeight) / ROW) + SPARE);
    const rows = [];
    for (let i = first; i < last; i += 1) {
      const one = h("div", { class: "option", role: "option", id: `option-${i}`, "aria-selected": String(i === at), "aria-setsize": entries.length, "aria-posinset": i + 1 }, row(entries[i]));
      one.style.top = `${i * ROW}px`;
      one.addEventListener("click", () => go(i));
      rows.push(one);
    }
    sheet.style.height = `${entries.length * ROW}px`;
    sheet.replaceChildren(...rows);
    if (at >= 0) element.setAttribute("aria-activedescendant", `option-${at}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function reveal() {
    const top = at * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + ROW > element.scrollTop + element.clientHeight) element.scrollTop = top + ROW - element.clientHeight;
  }

  function go(number) {
    if (!entries.length) return;
    at = Math.max(0, Math.min(entries.length - 1, number));
    reveal();
    draw();
    choose(entries[at]);
  }

  const page = () => Math.max(1, Math.floor(element.clientHeight / ROW) - 1);
  const KEYS = {
    ArrowDown: () => go(at + 1),
    ArrowUp: () => go(at - 1),
    PageDown: () => go(at + page()),
    PageUp: () => go(at - page()),
    Home: () => go(0),
    End: () => go(entries.length - 1),
  };
  element.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  element.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(element);

  const show = (found, chosen) => {
    entries = found;
    at = found.indexOf(chosen);
    reveal();
    draw();
  };
  return { element, show, step: (by) => go(at + by) };
}
