// The kept-token view: which tokens each compaction left in the cache, and in how many KV heads.
//
//   const view = keptView(element, records, { labels, layer, head, step });
//
// element: is filled, with a tooltip; nothing outside of it changes.
// records: one or two records, side by side: objects as in kept.jsonl, or the compact form that
//   kvpolicy/lab/report/kept_rows.py makes of them (then unpacked by `readKept`).
// options: labels: name of each record; layer, head: the first choice, null for all;
//   step: the first step shown, from 0; by default the last compaction.
// Returns { show({ layer, head, step }), state(), destroy() }.
//
// A step is a compaction of the chosen layers in one of the records; the last step is the end of
// the answers. Side by side, both records are shown at the same number of tokens.
// Text of models goes in as text nodes only. Colours come from kept.css.

import { button, fill, h, select } from "./dom.js";
import { chosen, countsAt, readKept, timesOf } from "./keptdata.js";
import { keptMap } from "./keptmap.js";
import { keptText } from "./kepttext.js";
import { describe, moment, scope, summary } from "./keptdescription.js";

const PLAY_MS = 8000; // a whole generation, at least a tenth of a second for each step
const LEVELS = 8;

export function keptView(element, records, options = {}) {
  const all = records.map(readKept);
  const widest = Math.max(...all.map((kept) => kept.tokens.length));
  const panels = all.map((kept, i) => makePanel(kept, options.labels?.[i] ?? "", widest, point, pick));
  const layers = [...new Set(panels.flatMap(({ kept }) => kept.layers.map((one) => one.layer)))];
  const numHeads = Math.max(...panels.flatMap(({ kept }) => kept.layers.map((one) => one.heads)), 0);
  const state = { layer: options.layer ?? null, head: options.head ?? null, step: 0 };
  let times = [];
  let playing = null;

  const chooseLayer = choiceOf("Layer", "all layers", layers, state.layer, (layer) => choose({ layer }));
  const heads = Array.from({ length: numHeads }, (_, head) => head);
  const chooseHead = choiceOf("KV head", "all heads", heads, state.head, (head) => choose({ head }));
  const slider = h("input", { type: "range", min: 0, step: 1, oninput: () => go(Number(slider.value)) });
  const play = button("Play", () => (playing ? pause() : start()), { class: "kept-play" });
  const legend = h("div", { class: "kept-legend" });
  const tip = h("div", { class: "kept-tip", role: "status", hidden: true });
  fill(
    element,
    h(
      "div",
      { class: "kept-controls" },
      chooseLayer.element,
      chooseHead.element,
      h(
        "div",
        { class: "kept-steps" },
        h("label", { class: "field" }, h("span", {}, "Step"), slider),
        button("\u2039", () => go(state.step - 1), { "aria-label": "Step before", class: "kept-before" }),
        button("\u203a", () => go(state.step + 1), { "aria-label": "Next step", class: "kept-next" }),
        play,
      ),
    ),
    legend,
    h("div", { class: "kept-panels", "data-panels": panels.length }, panels.map((panel) => panel.element)),
    tip,
  );
  element.classList.add("kept-view");

  function choose(change) {
    const time = times[state.step];
    Object.assign(state, change);
    chooseLayer.set(state.layer);
    chooseHead.set(state.head);
    times = [...new Set(panels.flatMap(({ kept }) => timesOf(kept, state)))].sort((a, b) => a - b);
    for (const panel of panels) panel.choose(state, times);
    fill(legend, legendOf(panels.map((panel) => panel.choice), state));
    slider.max = times.length - 1;
    const nearest = time === undefined ? times.length - 2 : times.findLastIndex((one) => one <= time);
    go(change.step ?? nearest);
  }

  function go(step) {
    state.step = Math.min(Math.max(step, 0), times.length - 1);
    slider.value = state.step;
    const states = panels.map((panel) => panel.show(times[state.step]));
    slider.setAttribute("aria-valuetext", `${state.step + 1} of ${times.length}: ${states.join("; ")}`);
    if (!tip.hidden) tip.hidden = true;
  }

  function pick(panel, p, time) {
    pause();
    go(Math.max(times.findLastIndex((one) => one <= time), 0));
    point(panel, p);
  }

  /** Tell of one token, where it stands in the text or on the map. */
  function point(panel, p, { scrolls = false, anchor = null } = {}) {
    for (const other of panels) if (other !== panel) other.mark(null);
    const span = panel.mark(p, scrolls);
    tip.hidden = p === null;
    if (p === null) return;
    fill(tip, panel.describe(p).map((line) => h("div", {}, line)));
    placeTooltip(tip, (anchor ?? span).getBoundingClientRect());
  }

  function start() {
    if (state.step === times.length - 1) go(0);
    const every = Math.max(PLAY_MS / times.length, 100);
    playing = setInterval(() => (state.step < times.length - 1 ? go(state.step + 1) : pause()), every);
    play.textContent = "Pause";
  }

  function pause() {
    clearInterval(playing);
    playing = null;
    play.textContent = "Play";
  }

  for (const panel of panels) {
    panel.map.element.addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      pause();
      go(state.step + by);
    });
    panel.element.addEventListener("focusout", () => point(panel, null));
  }
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const panel of panels) point(panel, null);
  });
  const redraw = () => panels.forEach((panel) => panel.redraw());
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", redraw);
  const themes = new MutationObserver(redraw);
  themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  const sizes = new ResizeObserver(redraw);
  panels.forEach((panel) => sizes.observe(panel.map.element));

  choose(options.step === undefined ? {} : { step: options.step });
  return {
    show: choose,
    state: () => ({ ...state, time: times[state.step], steps: times.length }),
    destroy() {
      pause();
      dark.removeEventListener("change", redraw);
      themes.disconnect();
      sizes.disconnect();
      element.replaceChildren();
    },
  };
}

/** One record: its text, its map, and their description. */
function makePanel(kept, label, widest, point, pick) {
  const panel = { kept, choice: null };
  let [state, times, time, counts, marked] = [null, [], 0, null, null];
  const text = keptText(kept, label, (p) => point(panel, p));
  const map = keptMap(kept, label, widest, {
    onPick: (p, at) => pick(panel, p, at),
    onPoint: (p) => point(panel, p, { anchor: p === null ? null : map.element }),
  });
  const where = h("p", { class: "kept-where" });
  const facts = h("p", { class: "kept-facts" });
  const axis = h("div", { class: "kept-axis" }, h("span", {}, "0"), h("span", {}, "across: position \u00b7 down: step"), h("span", {}, widest.toLocaleString("en")));
  const element = h("section", { class: "kept-panel", "aria-label": `Kept tokens, ${label}` }, h("h5", {}, label), where, facts, map.element, axis, text.element);
  const walk = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || !kept.tokens.length) return;
    event.preventDefault();
    const next = marked === null ? 0 : Math.min(Math.max(marked + by, 0), kept.tokens.length - 1);
    point(panel, next, { scrolls: true, anchor: event.currentTarget === map.element ? map.element : null });
  };
  map.element.addEventListener("keydown", walk);
  text.element.addEventListener("keydown", walk);
  return Object.assign(panel, {
    element,
    map,
    choose(choice, all) {
      state = choice;
      times = all;
      panel.choice = chosen(kept, state);
      map.draw(panel.choice, times);
    },
    redraw: () => map.draw(panel.choice, times),
    show(at) {
      time = at;
      counts = countsAt(kept, panel.choice, time);
      text.show(counts, panel.choice.total, time);
      map.at(time);
      where.textContent = moment(kept, timesOf(kept, state), time);
      facts.textContent = summary(kept, counts, panel.choice.total, time);
      return `${label} ${where.textContent}`;
    },
    mark(p, scrolls) {
      marked = p;
      map.mark(p);
      return text.mark(p, scrolls);
    },
    describe: (p) => describe(kept, panel.choice, counts, p, time),
  });
}

/** A choice of one number or all. */
function choiceOf(label, all, numbers, value, onchange) {
  const key = (one) => (one === null ? "all" : String(one));
  const named = numbers.map((one) => [key(one), String(one)]);
  const element = select(label, [["all", all], ...named], key(value), (one) => onchange(one === "all" ? null : Number(one)));
  return { element, set: (one) => (element.querySelector("select").value = key(one)) };
}

/** Legend of the shades, for the record with the most heads: one may have none. */
function legendOf(choices, state) {
  const choice = choices.reduce((one, other) => (other.total > one.total ? other : one));
  if (!choice.total) return [];
  const steps = choice.total <= LEVELS ? choice.total : LEVELS;
  const swatch = (level) => h("span", { class: "kept-token kept-swatch", "data-level": level, "aria-hidden": "true" });
  const shades = Array.from({ length: steps + 1 }, (_, i) => {
    const heads = Math.round((i * choice.total) / steps);
    return h("span", { class: "kept-shade" }, swatch(Math.ceil((LEVELS * i) / steps)), String(heads));
  });
  return [
    h("span", {}, "Held by"),
    ...shades,
    h("span", {}, `of ${scope(choice, state)}`),
    h("span", { class: "kept-shade kept-later" }, h("span", { class: "kept-token", "data-level": "later" }, "abc"), "not generated yet"),
  ];
}

/** Below the token, or above it if there is no space; within the window. */
function placeTooltip(tip, box) {
  const { width, height } = tip.getBoundingClientRect();
  const below = box.bottom + 6;
  const top = below + height > innerHeight ? Math.max(box.top - height - 6, 4) : below;
  tip.style.left = `${Math.max(Math.min(box.left, innerWidth - width - 8), 4)}px`;
  tip.style.top = `${top}px`;
}
