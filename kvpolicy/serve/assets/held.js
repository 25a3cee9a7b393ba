// The tokens of one sequence, each shaded by the number of KV heads that hold its row now.
//
//   const panel = heldPanel(name);
//   panel.take(event)   what a stream tells: see kvpolicy/serve/kept.py
//
// Tokens that have come since rows were last read are shown as held by all: nothing has evicted
// them yet. At the end they are shown as held by none: the last token never enters the cache.

import { fill, h, visible } from "./dom.js";
import { levelOf } from "./keptdata.js";

const LEVELS = 8;

export function heldPanel(name) {
  const facts = h("p", { class: "kept-facts" });
  const texts = { prompt: h("p"), answer: h("p") };
  const part = (label) => h("div", { class: `kept-part kept-${label}` }, h("span", { class: "kept-part-name" }, label), texts[label]);
  const box = h("div", { class: "kept-text", tabindex: 0, role: "group", "aria-label": `Tokens held, ${name}` }, part("prompt"), part("answer"));
  const element = h("section", { class: "kept-panel", "aria-label": name }, h("h2", {}, name), facts, box);
  let [spans, counts, of] = [[], [], 0];

  function clear() {
    [spans, counts, of] = [[], [], 0];
    fill(texts.prompt);
    fill(texts.answer);
    fill(facts, "Nothing is held.");
  }

  function take({ num_prompt: numPrompt, start, tokens, held, ended }) {
    if (start === 0) clear();
    const follows = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
    tokens.forEach((text, i) => {
      const span = h("span", { class: "kept-token" }, shown(text));
      spans.push(span);
      (start + i < numPrompt ? texts.prompt : texts.answer).append(span);
    });
    if (held) {
      of = held.of;
      counts = held.counts.flatMap(([count, times]) => Array(times).fill(count));
    }
    const newer = ended && held ? 0 : of;
    let numHeld = 0;
    spans.forEach((span, p) => {
      const count = p < counts.length ? counts[p] : newer;
      numHeld += count > 0;
      const level = String(levelOf(count, of));
      if (span.dataset.level === level && span.dataset.heads === String(count)) return;
      span.dataset.level = level;
      span.dataset.heads = count;
      span.title = `token ${p}: held by ${count} of ${of} KV heads`;
    });
    const rows = held ? `; rows by layer: ${held.rows.join(", ")}` : "";
    if (held || start === 0) fill(facts, `${numHeld} of ${spans.length} tokens are held by some KV head${rows}`);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  clear();
  return { element, take, clear };
}

/** What the shades mean. */
export function legend() {
  const swatch = (level) => h("span", { class: "kept-shade" }, h("span", { class: "kept-token kept-swatch", "data-level": level, "aria-hidden": "true" }));
  const shades = Array.from({ length: LEVELS + 1 }, (_, level) => swatch(level));
  return [h("span", {}, "Held by no KV head"), ...shades, h("span", {}, "by all of them")];
}

/** A token with what nobody would see. */
function shown(text) {
  if (text === "") return "\u00b7";
  return visible(text).replaceAll(/\n+/g, (ends) => `${"\u21b5".repeat(ends.length)}\n`);
}
