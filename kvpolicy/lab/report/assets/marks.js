// Looks of series, which Python chooses: colours of policies, and shapes for readers without colour vision.

import { svg } from "./dom.js";

// In the order of MARKERS in kvpolicy/lab/looks.py.
const SHAPES = [
  "M-4.2,0a4.2,4.2 0 1,0 8.4,0a4.2,4.2 0 1,0 -8.4,0z",
  "M-3.8,-3.8h7.6v7.6h-7.6z",
  "M0,-5.2l5.2,5.2l-5.2,5.2l-5.2,-5.2z",
  "M0,-5l4.8,8.6h-9.6z",
  "M0,5l4.8,-8.6h-9.6z",
  "M-1.8,-5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
  "M0,-6.4l1.8,4.2l4.6,0.4l-3.5,3l1.1,4.5l-4,-2.4l-4,2.4l1.1,-4.5l-3.5,-3l4.6,-0.4z",
  "M-5,0l8.6,-4.8v9.6z",
  "M5,0l-8.6,-4.8v9.6z",
];
const LINE_WIDTH = 2; // pixels

/** Class that gives a cell the colour of its policy. */
export const classOf = (cell) => `c-${cell.look.colour}`;

/** Dashes of a line in pixels; null for a solid one. */
export const dashes = (look) => look.dashes.map((part) => part * LINE_WIDTH).join(" ") || null;

/** The marker of a look at a position. */
export function marker(look, x = 0, y = 0) {
  return svg("path", { class: "marker", d: SHAPES[look.marker], transform: `translate(${x},${y})` });
}

/** A sample of the line of a cell, for legends; a reference, which has no place on the axis, has no marker. */
export function glyph(cell) {
  const { look } = cell;
  const box = { class: `glyph ${classOf(cell)}`, viewBox: "-19 -7 38 14", width: 38, height: 14, "aria-hidden": "true" };
  const line = svg("line", { class: "line", x1: -18, x2: 18, y1: 0, y2: 0, "stroke-dasharray": dashes(look) });
  return svg("svg", box, line, cell.size === null ? null : marker(look));
}
