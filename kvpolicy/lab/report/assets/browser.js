// The sample browser: two cells side by side, what to show of them, and the list of samples.

import { fill, h, select, visible } from "./dom.js";
import { number, plural } from "./figures.js";
import { facetOf, formatFacets, openBlock, sampleOf, textsOf } from "./data.js";
import { picker } from "./picker.js";
import { detail } from "./detail.js";
import { forget } from "./keptpart.js";
import { verdict } from "./verdict.js";

const NONE = "none";

/** Filters by name: label, and whether a pair of samples passes. */
const FILTERS = {
  all: ["all", () => true],
  correct: ["A correct", (a) => a?.verdict === "1"],
  wrong: ["A wrong", (a) => a && a.verdict !== "1"],
  differs: ["A and B differ", (a, b) => a && b && a.verdict !== b.verdict],
  better: ["only A correct", (a, b) => a && b && a.verdict === "1" && b.verdict !== "1"],
  worse: ["only B correct", (a, b) => a && b && a.verdict !== "1" && b.verdict === "1"],
  truncated: ["truncated", (a, b) => a?.finish === "l" || b?.finish === "l"],
  failed: ["failed", (a, b) => a?.finish === "e" || b?.finish === "e"],
  ungraded: ["ungraded", (a, b) => a?.verdict === "?" || b?.verdict === "?"],
};
const OF_TWO = ["differs", "better", "worse"];
const OF_VERDICTS = ["correct", "wrong", "ungraded", ...OF_TWO];

/** The browser of a group; `pick(cell, filter)` shows a cell's samples: all, or those that pass. */
export function browser(group) {
  const state = { a: 0, b: group.cells.length > 1 ? 1 : null, filter: "all", facet: "", query: "", entry: null };
  const place = { controls: h("div", { class: "controls" }), count: h("p", { class: "count", role: "status" }), list: h("div"), detail: h("div", { class: "detail" }) };
  const list = picker((entry) => choose(entry), (entry) => rowOf(group, state, entry));
  place.list.append(list.element);
  let latest = 0;

  async function refresh() {
    const ticket = (latest += 1);
    if (state.query) fill(place.count, "Searching \u2026");
    let entries = [];
    try {
      entries = await matching(group, state);
    } catch (error) {
      if (ticket !== latest) return;
      fill(place.count, "The search failed.");
      return complain(error);
    }
    if (ticket !== latest) return; // a later choice was quicker
    fill(place.count, `${plural(entries.length, "sample")} of ${number(group.entries.length)}`);
    if (!entries.includes(state.entry)) state.entry = entries[0] ?? null;
    list.show(entries, state.entry);
    await choose(state.entry);
  }

  async function choose(entry) {
    state.entry = entry;
    if (entry === null) return message("No sample passes. Loosen the filter or the search.");
    try {
      const texts = await textsOf(group, Math.floor(entry / group.attempts));
      if (entry === state.entry) await detail(place.detail, group, state, entry, texts, list.step);
    } catch (error) {
      if (entry === state.entry) complain(error);
    }
  }

  function message(text, role = null) {
    forget();
    fill(place.detail, h("p", { class: "empty", role }, text));
  }

  const complain = (error) => message(error.message, "alert");

  const change = (name, value) => {
    const { id } = document.activeElement;
    state[name] = value;
    controls(); // anew, so that whoever came by keyboard is brought back
    if (id) document.getElementById(id)?.focus();
    return refresh();
  };
  const controls = () => fill(place.controls, choices(group, state, change), chips(group, state, change));
  const search = searchField((query) => change("query", query));
  const pick = (cell, filter = "all") => {
    if (filter !== "all") state.b = null; // its samples would be listed as well
    else if (state.b === cell) state.b = state.a === cell ? null : state.a;
    Object.assign(state, { a: cell, filter });
    controls();
    return refresh();
  };
  controls();
  const side = h("div", { class: "side" }, search, place.count, place.list);
  const element = h("div", {}, place.controls, h("div", { class: "browser" }, side, place.detail));
  return { element, pick, begin: refresh };
}

function choices(group, state, change) {
  const cells = group.cells.map((cell) => [String(cell.number), visible(cell.label)]);
  const cellOf = (value) => (value === NONE ? null : Number(value));
  const facets = [["", "any"]];
  group.facets.forEach((facet, f) => facet.of_items && facet.values.forEach((value, i) => facets.push([`${f} ${i}`, visible(`${facet.name} ${value}`)])));
  return h("div", { class: "fields" },
    select("A", cells, String(state.a), (value) => change("a", cellOf(value)), { id: "cell-a" }),
    select("B", [[NONE, "no second cell"], ...cells], state.b === null ? NONE : String(state.b), (value) => change("b", cellOf(value)), { id: "cell-b" }),
    facets.length > 1 ? select("Difficulty", facets, state.facet, (value) => change("facet", value), { id: "only" }) : null);
}

function chips(group, state, change) {
  const [a, b] = [group.cells[state.a], state.b === null ? null : group.cells[state.b]];
  const pairs = group.entries.map((entry) => [sampleOf(a, entry), b && sampleOf(b, entry)]);
  const hidden = [...(b ? [] : OF_TWO), ...(group.graded ? [] : OF_VERDICTS)];
  const shown = Object.entries(FILTERS).filter(([name]) => !hidden.includes(name));
  const fields = shown.map(([name, [label, passes]]) => {
    const count = pairs.filter((pair) => (pair[0] || pair[1]) && passes(...pair)).length;
    const radio = h("input", { type: "radio", name: "filter", value: name, id: `filter-${name}`, onchange: () => change("filter", name) });
    radio.checked = state.filter === name;
    return h("label", { class: "chip" }, radio, h("span", {}, label, h("small", {}, ` ${number(count)}`)));
  });
  return h("fieldset", { class: "chips" }, h("legend", { class: "hidden" }, "Show"), fields);
}

function searchField(onquery) {
  let timer = 0;
  const field = h("input", { type: "search", id: "search", placeholder: "in prompts and traces", autocomplete: "off" });
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => onquery(field.value.trim()), 150);
  });
  return h("label", { class: "field" }, h("span", {}, "Search"), field);
}

async function matching(group, state) {
  const [a, b] = [group.cells[state.a], state.b === null ? null : group.cells[state.b]];
  const [, passes] = FILTERS[state.filter];
  const [facet, value] = state.facet.split(" ").map(Number);
  const hasFacet = (place) => !state.facet || facetOf(group.items[place], group.facets[facet]) === value;
  const entries = group.entries.filter((entry) => {
    const pair = [sampleOf(a, entry), b && sampleOf(b, entry)];
    return (pair[0] || pair[1]) && hasFacet(Math.floor(entry / group.attempts)) && passes(...pair);
  });
  return state.query ? found(group, state, entries) : entries;
}

async function found(group, state, entries) {
  const query = state.query.toLowerCase();
  await Promise.all(group.blocks.map((block) => openBlock(block.block)));
  const hits = await Promise.all(entries.map(async (entry) => {
    const texts = await textsOf(group, Math.floor(entry / group.attempts));
    const traces = [state.a, state.b].map((cell) => texts.cells[cell]?.[entry % group.attempts]);
    const parts = [texts.prompt, ...traces.flatMap((trace) => (trace ? [trace.pieces] : []))];
    return parts.some((pieces) => pieces.map((piece) => piece[1]).join("").toLowerCase().includes(query));
  }));
  return entries.filter((_, i) => hits[i]);
}

function rowOf(group, state, entry) {
  const item = group.items[Math.floor(entry / group.attempts)];
  const attempt = group.attempts > 1 ? ` try ${(entry % group.attempts) + 1}` : "";
  const cells = [state.a, state.b].filter((cell) => cell !== null);
  const marks = cells.map((cell) => {
    const { mark, text, kind } = verdict(sampleOf(group.cells[cell], entry));
    return h("span", { class: `verdict ${kind}`, title: text, role: "img", "aria-label": text }, mark);
  });
  return [
    h("span", { class: "marks" }, marks),
    h("span", { class: "what" }, h("strong", {}, `#${item.item}${attempt}`), h("small", {}, visible(` ${formatFacets(group, item).join(", ")}`)), h("bdi", { class: "snippet" }, visible(item.head))),
  ];
}
