// A text in pieces: coloured by kind, search hits marked, and the position where two texts differ.

import { h, visible } from "./dom.js";

/** A text. pieces: [[kind, text], ...]; `parted`: the place before which another text is the same. */
export function trace(pieces, query = "", parted = null) {
  const found = [];
  let place = 0;
  for (const [kind, text] of pieces) {
    const split = kind === "cut" || parted === null ? text.length : parted - place;
    const parts = split > 0 && split < text.length ? [text.slice(0, split), text.slice(split)] : [text];
    if (split === 0 && parted !== null) found.push(partingMark());
    parts.forEach((part, i) => {
      if (i) found.push(partingMark());
      found.push(piece(kind, part, query));
    });
    place += kind === "cut" ? 0 : text.length;
  }
  return h("div", { class: "text", dir: "auto", tabindex: 0, role: "region", "aria-label": "Text" }, found);
}

function partingMark() {
  return h("span", { class: "parting", title: "Up to here the two texts are the same", role: "img", "aria-label": "The two texts part here" }, "\u21c5");
}

function piece(kind, text, query) {
  if (kind === "cut") return h("span", { class: "left-out" }, `${text} characters are left out here; samples.jsonl has them`);
  return h("span", { class: className(kind), "data-kind": kind || null }, marked(text, query));
}

function marked(text, query) {
  if (!query) return visible(text);
  const literal = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
  const found = [];
  let place = 0;
  for (const hit of text.matchAll(literal)) {
    found.push(visible(text.slice(place, hit.index)), h("mark", {}, visible(hit[0])));
    place = hit.index + hit[0].length;
  }
  return [...found, visible(text.slice(place))];
}

const kinds = new Map();

function className(kind) {
  return kinds.get(kind) || "";
}

/** Give the kinds of a group their colours; the first is the usual one and has none. */
export function nameKinds(group) {
  kinds.clear();
  group.kinds.forEach((kind, i) => kinds.set(kind, `kind kind-${i === 0 ? 0 : 1 + ((i - 1) % 5)}`));
  kinds.set("answer", "kind kind-answer");
  kinds.set("tag", "kind kind-tag");
}

/** Legend of the colours. */
export function legend(group) {
  const names = [...group.kinds, "answer"].map((kind) => h("span", { class: className(kind) }, visible(kind)));
  const source = group.rules.source ? ` (${visible(group.rules.source)})` : "";
  const note = `Thoughts, the text between blank lines, are coloured by the rules \u201c${visible(group.rules.name)}\u201d${source}: by their words only.`;
  return h("p", { class: "kinds" }, names, h("span", { class: "note" }, note));
}

/** Where two texts part: {place, note}. The place is the number of letters that they have in common
 * from the beginning; it is null, and the note says why, if they are the same as far as is known. */
export function parting(one, other) {
  const [a, b] = [beginning(one), beginning(other)];
  let same = 0;
  while (same < a.text.length && same < b.text.length && a.text[same] === b.text[same]) same += 1;
  if ([a, b].some(({ text, isCut }) => isCut && same === text.length)) {
    return { place: null, note: "The two texts are the same up to what is left out." };
  }
  if (same === a.text.length && same === b.text.length) return { place: null, note: "The two texts are the same." };
  return { place: isHalf(a.text, same) || isHalf(b.text, same) ? same - 1 : same, note: null };
}

/** A text as far as nothing is left out. */
function beginning(pieces) {
  const end = pieces.findIndex(([kind]) => kind === "cut");
  const whole = end < 0 ? pieces : pieces.slice(0, end);
  return { text: whole.map(([, text]) => text).join(""), isCut: end >= 0 };
}

/** Whether a place is in the middle of a letter: some take two units of UTF-16. */
const isHalf = (text, place) => /^[\ud800-\udbff][\udc00-\udfff]$/.test(text.slice(Math.max(place - 1, 0), place + 1));
