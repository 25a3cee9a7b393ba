// The tokens of a record as running text, each shaded by the number of KV heads that hold it.

import { h, visible } from "./dom.js";
import { levelOf } from "./keptdata.js";

const NOT_YET = -1;

/** The text: `show` shades it, `mark` points at a token. Tokens are touched only if they change. */
export function keptText(kept, label, onPoint) {
  const spans = shown(kept.tokens).map((text) => h("span", { class: "kept-token" }, text));
  spans.forEach((span, p) => (span.dataset.p = p));
  const part = (name, tokens) =>
    h("div", { class: `kept-part kept-${name}` }, h("span", { class: "kept-part-name" }, name), h("p", {}, tokens));
  const element = h(
    "div",
    { class: "kept-text", tabindex: 0, role: "group", "aria-label": `Tokens, ${label}: arrow keys go from one to the next` },
    part("prompt", spans.slice(0, kept.numPrompt)),
    part("answer", spans.slice(kept.numPrompt)),
  );
  const place = (event) => {
    const p = event.target.dataset?.p;
    return p === undefined ? null : Number(p);
  };
  element.addEventListener("pointerover", (event) => onPoint(place(event)));
  element.addEventListener("pointerleave", () => onPoint(null));
  element.addEventListener("click", (event) => onPoint(place(event)));

  const levels = new Int16Array(spans.length).fill(-2);
  const numbers = new Int32Array(spans.length).fill(-1);
  let marked = null;
  return {
    element,
    show(counts, total, time) {
      const joined = Math.min(time, kept.end);
      for (let p = 0; p < spans.length; p++) {
        const level = p < joined ? levelOf(counts[p], total) : NOT_YET;
        if (level !== levels[p]) spans[p].dataset.level = level === NOT_YET ? "later" : level;
        if (counts[p] !== numbers[p]) spans[p].dataset.heads = counts[p];
        [levels[p], numbers[p]] = [level, counts[p]];
      }
    },
    mark(p, scrolls) {
      if (marked !== null) delete spans[marked].dataset.marked;
      marked = p;
      if (p === null) return null;
      spans[p].dataset.marked = "";
      if (scrolls) scrollWithin(element, spans[p]);
      return spans[p];
    },
  };
}

/** Token texts with what nobody would see: line ends, and tokens that add nothing by themselves. */
function shown(texts) {
  return texts.map((text, p) => {
    if (text === "") return "\u00b7";
    const seen = visible(text).replaceAll(/\n+/g, (ends) => `${"\u21b5".repeat(ends.length)}\n`);
    const goesOn = texts[p + 1]?.startsWith("\n") && seen.endsWith("\n"); // no empty lines
    return goesOn ? seen.slice(0, -1) : seen;
  });
}

/** Bring a token into view without moving the page. */
function scrollWithin(box, span) {
  const [outer, inner] = [box.getBoundingClientRect(), span.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
  if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
}
