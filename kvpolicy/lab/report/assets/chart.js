// One chart: axes, intervals, lines, and points that can be pointed at or walked along by keys.

import { h, svg, visible } from "./dom.js";
import { dashes, marker } from "./marks.js";
import { scale, sparse } from "./scales.js";

const ROOM = { top: 12, right: 16, bottom: 46 };
const LETTER = 7; // pixels, about
const HEIGHT = 300;
const ASIDE = 3; // pixels, so that the intervals of one budget do not hide each other

/**
 * A chart that redraws itself when its width changes.
 *
 * spec: {name, title, x: axis, y: axis, points, bands, stairs, onpick}
 * axis: {title, low, high, log, ticks: [[value, text], ...]}
 * points: [{series, look (a class), mark (a look), label, x, y, low, high, lines: [text, ...], cell}, ...] in the order of lines
 * bands: [{look, mark, label, y, low, high, lines, cell}, ...], cells without a budget
 * stairs: [[x, y], ...], a frontier; `joined`: whether points of a series are connected by more than a thin line
 */
export function chart(spec) {
  const tip = h("div", { class: "tip", hidden: true });
  const box = h("div", { class: "plot" });
  const host = h("div", { class: "chart", id: `chart-${spec.name}` }, box, tip);
  let width = 0;
  const draw = () => {
    const found = Math.round(host.clientWidth);
    if (!found || found === width) return;
    width = found;
    box.replaceChildren(picture(spec, width, tip));
  };
  new ResizeObserver(draw).observe(host);
  return host;
}

function picture(spec, width, tip) {
  const left = 38 + LETTER * Math.max(0, ...spec.y.ticks.map(([, text]) => text.length));
  const inner = { left, right: width - ROOM.right, top: ROOM.top, bottom: HEIGHT - ROOM.bottom };
  const x = scale(spec.x.low, spec.x.high, inner.left, inner.right, spec.x.log);
  const y = scale(spec.y.low, spec.y.high, inner.bottom, inner.top, spec.y.log);
  const frame = { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "group", "aria-label": `${spec.title}, chart` };
  const marks = spec.bands.map((band) => bandMark(spec, band, y, inner));
  const sets = seriesOf(spec.points);
  sets.forEach((points, i) => {
    const aside = spec.joined ? ASIDE * (i - (sets.length - 1) / 2) : 0;
    marks.push(seriesMark(spec, points, (v) => x(v) + aside, y, inner));
  });
  const image = svg("svg", frame, axes(spec, x, y, inner), stairs(spec, x, y), marks);
  listen(image, spec, tip);
  return image;
}

function seriesOf(points) {
  const found = new Map();
  for (const point of points) found.set(point.series, [...(found.get(point.series) || []), point]);
  return [...found.values()];
}

function axes(spec, x, y, { left, right, top, bottom }) {
  const parts = [svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom })];
  for (const [value, text] of spec.y.ticks) {
    parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  const places = spec.x.ticks.map(([value]) => x(value));
  const widest = Math.max(0, ...spec.x.ticks.map(([, text]) => text.length));
  const shown = sparse(places, LETTER * widest + 8);
  spec.x.ticks.forEach(([, text], i) => {
    parts.push(svg("line", { class: "axis", x1: places[i], x2: places[i], y1: bottom, y2: bottom + 4 }));
    if (shown[i]) parts.push(svg("text", { class: "tick", x: places[i], y: bottom + 18, "text-anchor": "middle" }, text));
  });
  parts.push(svg("text", { class: "title", x: (left + right) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, fitted(spec.x.title, right - left)));
  const turned = `translate(14,${(top + bottom) / 2}) rotate(-90)`;
  parts.push(svg("text", { class: "title", transform: turned, "text-anchor": "middle" }, fitted(spec.y.title, bottom - top)));
  return svg("g", { "aria-hidden": "true" }, parts);
}

/** A title shortened to the space it has; the chart's heading has all of it. */
function fitted(title, room) {
  const most = Math.floor(room / LETTER);
  const text = visible(title);
  return text.length <= most ? text : `${text.slice(0, most - 1)}\u2026`;
}

function stairs(spec, x, y) {
  if (!spec.stairs || spec.stairs.length < 2) return null;
  const [first, ...rest] = spec.stairs;
  const path = rest.map(([a, b]) => `H${x(a)}V${y(b)}`).join("");
  return svg("path", { class: "stairs", d: `M${x(first[0])},${y(first[1])}${path}` });
}

function bandMark(spec, band, y, { left, right }) {
  const parts = [];
  if (band.low !== null) {
    const height = Math.max(0, y(band.low) - y(band.high));
    parts.push(svg("rect", { class: "band", x: left, width: right - left, y: y(band.high), height }));
  }
  parts.push(svg("line", { class: "line", x1: left, x2: right, y1: y(band.y), y2: y(band.y), "stroke-dasharray": dashes(band.mark) }));
  parts.push(svg("rect", { class: "hit", x: left, width: right - left, y: y(band.y) - 6, height: 12 }));
  return svg("g", { class: band.look }, spot(band, (left + right) / 2, y(band.y), parts));
}

function seriesMark(spec, points, x, y) {
  const path = points.map((point) => `${x(point.x)},${y(point.y)}`).join("L");
  const spots = points.map((point) => {
    const [px, py] = [x(point.x), y(point.y)];
    const bar = point.low === null ? null : svg("line", { class: "bar", x1: px, x2: px, y1: y(point.low), y2: y(point.high) });
    return spot(point, px, py, [bar, svg("circle", { class: "hit", cx: px, cy: py, r: 13 }), marker(point.mark, px, py)]);
  });
  const line = points.length > 1 ? svg("path", { class: spec.joined ? "line" : "line thin", d: `M${path}`, "stroke-dasharray": dashes(points[0].mark) }) : null;
  return svg("g", { class: `series ${points[0].look}`, "data-series": points[0].series }, line, spots);
}

/** A mark that reacts to pointer and keys. */
function spot(point, x, y, parts) {
  const description = [point.label, ...point.lines].map(visible).join("; ");
  const place = { "data-cell": point.cell, "data-x": point.x, "data-y": point.y, "data-low": point.low, "data-high": point.high };
  const role = { role: "button", tabindex: -1, "aria-label": `${description}. Opens its samples.` };
  const mark = svg("g", { class: "spot", ...role, ...place }, parts);
  mark.tip = { x, y, title: visible(point.label), lines: point.lines.map(visible) };
  return mark;
}

function listen(image, spec, tip) {
  const spots = [...image.querySelectorAll(".spot")];
  if (spots.length) spots[0].setAttribute("tabindex", 0);
  const found = (event) => event.target.closest(".spot");
  const point = (event) => (found(event) ? showTip(tip, found(event).tip, image) : hideTip(tip));
  image.addEventListener("pointermove", point);
  image.addEventListener("focusin", point);
  image.addEventListener("pointerleave", () => hideTip(tip));
  image.addEventListener("focusout", () => hideTip(tip));
  image.addEventListener("click", (event) => found(event) && spec.onpick(Number(found(event).dataset.cell)));
  image.addEventListener("keydown", (event) => walk(event, spots, spec, tip));
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

function walk(event, spots, spec, tip) {
  const here = spots.indexOf(document.activeElement);
  if (here < 0) return;
  if (event.key === "Escape") hideTip(tip);
  else if (event.key === "Enter" || event.key === " ") spec.onpick(Number(spots[here].dataset.cell));
  else if (event.key === "Home") focus(spots, 0);
  else if (event.key === "End") focus(spots, spots.length - 1);
  else if (event.key in STEPS) focus(spots, (here + STEPS[event.key] + spots.length) % spots.length);
  else return;
  event.preventDefault();
}

function focus(spots, number) {
  spots.forEach((one, i) => one.setAttribute("tabindex", i === number ? 0 : -1));
  spots[number].focus();
}

function showTip(tip, { x, y, title, lines }, image) {
  tip.replaceChildren(h("strong", {}, title), ...lines.map((line) => h("div", {}, line)));
  tip.hidden = false;
  const room = image.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(room, x - tip.offsetWidth / 2))}px`;
  const above = y - tip.offsetHeight - 14;
  tip.style.top = `${above > -20 ? above : y + 14}px`;
}

function hideTip(tip) {
  tip.hidden = true;
}
