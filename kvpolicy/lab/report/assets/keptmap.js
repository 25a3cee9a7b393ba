// The survival map: a column for each position, a row for each compaction, shaded by heads.
// Side by side, maps have one scale: that of a shorter answer is narrower, and ends sooner.

import { h } from "./dom.js";
import { survival } from "./keptdata.js";

const MOST_ROWS = 320;
const LEVELS = 8;

/** The map: `draw` paints it, `at` draws the line of a time. `widest`: tokens of the longest record;
 * `onPick` gets (position, time), `onPoint` a position or null. */
export function keptMap(kept, label, widest, { onPick, onPoint }) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const now = h("div", { class: "kept-now" });
  const border = h("div", { class: "kept-border" });
  const cursor = h("div", { class: "kept-cursor", hidden: true });
  const element = h(
    "div",
    { class: "kept-map", tabindex: 0, role: "group" },
    canvas,
    border,
    now,
    cursor,
  );
  let rows = [];
  let times = [];

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const part = (at, from, size) => Math.min(Math.max((at - from) / size, 0), 0.99999);
    const row = Math.floor(part(event.clientY, box.top, box.height) * rows.length);
    const p = Math.floor(part(event.clientX, box.left, box.width) * kept.tokens.length);
    return [p, rows[row]];
  };
  element.addEventListener("pointerdown", (event) => {
    element.setPointerCapture(event.pointerId);
    onPick(...place(event));
  });
  element.addEventListener("pointermove", (event) => {
    if (event.buttons) onPick(...place(event));
    else onPoint(place(event)[0]);
  });
  element.addEventListener("pointerleave", () => onPoint(null));

  canvas.style.width = percent(kept.tokens.length, widest);
  border.style.left = percent(kept.numPrompt, widest);
  return {
    element,
    /** Paint what is chosen; `all` are the times of the slider. */
    draw(choice, all) {
      times = all;
      rows = thinned(all);
      element.setAttribute(
        "aria-label",
        `Survival map, ${label}: ${kept.tokens.length} positions from left to right, ` +
          `${all.length} steps from top to bottom; up and down change the step, left and right the token`,
      );
      const lasts = rows.findIndex((time) => time >= kept.end) + 1; // what comes later is the other's
      paint(canvas, survival(kept, choice, rows), { width: kept.tokens.length, lasts, height: rows.length }, choice.total, colours(element));
    },
    at(time) {
      const step = times.findLastIndex((one) => one <= time);
      now.style.top = percent(step + 0.5, times.length);
    },
    mark(p) {
      cursor.hidden = p === null;
      if (p !== null) cursor.style.left = percent(p + 0.5, widest);
    },
  };
}

const percent = (part, whole) => `${whole ? (100 * part) / whole : 0}%`;

/** At most as many times as the map has rows. */
function thinned(times) {
  if (times.length <= MOST_ROWS) return times;
  return Array.from({ length: MOST_ROWS }, (_, i) => times[Math.floor(((i + 1) * times.length) / MOST_ROWS) - 1]);
}

/** One pixel for each position, or for as many as share one, and one for each row. */
function paint(canvas, counts, { width, lasts, height }, total, palette) {
  const columns = Math.max(Math.min(width, Math.ceil(canvas.clientWidth * (window.devicePixelRatio || 1)) || width), 1);
  canvas.width = columns;
  canvas.height = Math.max(height, 1);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, canvas.height);
  for (let row = 0; row < lasts; row++) {
    for (let column = 0; column < columns; column++) {
      const first = Math.floor((column * width) / columns);
      const last = Math.max(Math.floor(((column + 1) * width) / columns), first + 1);
      let [sum, num] = [0, 0];
      for (let p = first; p < last; p++) {
        const count = counts[row * width + p];
        if (count < 0) continue;
        sum += count;
        num++;
      }
      if (num) image.data.set(palette(total ? sum / num / total : 0), 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
}

/** The shades of the text as a scale without steps, as the theme has them. */
function colours(element) {
  const probe = h("span", { class: "kept-token" });
  element.append(probe);
  const stops = Array.from({ length: LEVELS + 1 }, (_, level) => {
    probe.dataset.level = level;
    const found = getComputedStyle(probe).getPropertyValue("--kept-shade").trim();
    return [1, 3, 5].map((from) => Number.parseInt(found.slice(from, from + 2), 16));
  });
  probe.remove();
  return (share) => {
    const place = Math.min(share, 1) * LEVELS;
    const [low, high] = [stops[Math.floor(place)], stops[Math.ceil(place)]];
    return [...low.map((one, i) => Math.round(one + (high[i] - one) * (place % 1))), 255];
  };
}
