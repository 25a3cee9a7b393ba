// Colours after Okabe and Ito for series, and shapes for readers without colour vision.

import { svg } from "./dom.js";

const SHAPES = [
  "M-4.2,0a4.2,4.2 0 1,0 8.4,0a4.2,4.2 0 1,0 -8.4,0z",
  "M-3.8,-3.8h7.6v7.6h-7.6z",
  "M0,-5.2l5.2,5.2l-5.2,5.2l-5.2,-5.2z",
  "M0,-5l4.8,8.6h-9.6z",
  "M0,5l4.8,-8.6h-9.6z",
  "M-1.8,-5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
];
const NUM_COLOURS = 6;

/** Classes that give a series its colour; a second round of colours is hollow and dashed. */
export function seriesClass(number) {
  const again = Math.floor(number / NUM_COLOURS) % 2 ? " again" : "";
  return `series c${number % NUM_COLOURS}${again}`;
}

/** The same for a cell; cells without a budget are no line of the plots, and have no colour. */
export const classOf = (cell) => (cell.budget === null ? "series no-budget" : seriesClass(cell.series));

/** The marker of a series at a position. */
export function marker(number, x = 0, y = 0) {
  const round = Math.floor(number / NUM_COLOURS);
  return svg("path", { class: "marker", d: SHAPES[(number + round) % SHAPES.length], transform: `translate(${x},${y})` });
}

/** A sample of the line of a cell, for legends; those without a budget are dashed. */
export function glyph(cell) {
  const reference = cell.budget === null;
  const box = { class: `glyph ${classOf(cell)}`, viewBox: "-14 -7 28 14", width: 28, height: 14, "aria-hidden": "true" };
  const line = svg("line", { class: reference ? "reference" : "line", x1: -13, x2: 13, y1: 0, y2: 0 });
  return svg("svg", box, line, marker(cell.series));
}
