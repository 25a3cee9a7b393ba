// One sample: its prompt, and the answers of one or two cells.

import { button, fill, h, visible } from "./dom.js";
import { bytes, format, number, plural } from "./figures.js";
import { formatFacets, sampleOf } from "./data.js";
import { glyph } from "./marks.js";
import { legend, parting, trace } from "./trace.js";
import { verdict } from "./verdict.js";
import { kept } from "./keptpart.js";

/** Show an entry of a group in an element. `step(by)` goes to a neighbour. */
export async function detail(place, group, state, entry, texts, step) {
  const attempt = entry % group.attempts;
  const item = group.items[Math.floor(entry / group.attempts)];
  const cells = [state.a, state.b].filter((cell) => cell !== null).map((cell) => group.cells[cell]);
  const answers = cells.map((cell) => texts.cells[cell.number]?.[attempt] || null);
  const parted = answers[0] && answers[1] ? parting(answers[0].pieces, answers[1].pieces) : { place: null };
  const columns = cells.map((cell, i) => column(group, cell, entry, answers[i], state.query, parted.place));
  const view = h("div", { class: "kept" });
  const note = parted.note ? h("p", { class: "note" }, parted.note) : null;
  fill(place, head(group, item, attempt, texts, step), asked(texts, state.query), legend(group), note, h("div", { class: `traces of-${cells.length}` }, columns), view);
  await kept(view, cells, entry);
}

function head(group, item, attempt, texts, step) {
  const attempts = group.attempts > 1 ? `, attempt ${attempt + 1} of ${group.attempts}` : "";
  const facets = formatFacets(group, item).map((facet) => h("span", { class: "pill" }, visible(facet)));
  const answer = texts.answer ? h("p", { class: "expected" }, "Correct answer: ", h("bdi", {}, visible(texts.answer))) : null;
  const steps = h("span", { class: "steps" }, button("\u2191 before", () => step(-1), { class: "quiet", "aria-label": "Sample before" }), button("\u2193 next", () => step(1), { class: "quiet", "aria-label": "Next sample" }));
  return h("header", {}, h("h3", {}, `Item ${number(item.item)}${attempts} `, facets), steps, answer);
}

function asked(texts, query) {
  const parts = [h("details", { class: "asked", open: true }, h("summary", {}, "Prompt"), trace(texts.prompt, query))];
  if (texts.reference) parts.push(h("details", { class: "asked" }, h("summary", {}, "Reference"), trace(texts.reference, query)));
  return parts;
}

function column(group, cell, entry, answer, query, parted) {
  const sample = sampleOf(cell, entry);
  const { mark, text, kind } = verdict(sample);
  const title = h("h4", {}, glyph(cell), h("bdi", {}, visible(cell.label)));
  const badge = h("p", { class: "badge" }, h("span", { class: `verdict ${kind}`, "aria-hidden": "true" }, mark), ` ${text}`);
  if (!sample || !answer) return h("article", { class: "trace-column" }, title, h("p", { class: "empty" }, "This cell has no such sample."));
  const problems = [answer.error, answer.ungraded].filter(Boolean).map((text) => h("p", { class: "problem" }, visible(text)));
  return h("article", { class: "trace-column", "aria-label": `Trace of ${visible(cell.label)}` }, title, badge, facts(group, sample, answer), problems, trace(answer.pieces, query, parted));
}

function facts(group, sample, answer) {
  const values = Object.entries(answer.values).map(([name, value]) => `${visible(name)} ${format({}, value)}`);
  const steps = sample.tokens - 1; // seconds are counted from the first token
  const speed = steps > 0 && sample.seconds > 0 ? [`${number(Math.round(steps / sample.seconds))} tokens/s`] : [];
  const parts = [
    `${plural(sample.prompt, "prompt token")}, ${plural(sample.tokens, "new token")}`,
    `${plural(sample.compactions, "compaction")}, ${plural(sample.evicted, "row")} evicted`,
    `at most ${bytes(sample.bytes)} of keys and values`,
    ...speed,
    ...values,
  ];
  return h("ul", { class: "facts-line" }, parts.map((part) => h("li", {}, part)));
}
