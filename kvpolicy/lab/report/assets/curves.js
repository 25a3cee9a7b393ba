// Charts of quantities against the budget or the bytes of a sequence, and the frontier of quality and memory.

import { button, fill, h, visible } from "./dom.js";
import { chart } from "./chart.js";
import { estimate, format, number } from "./figures.js";
import { classOf, glyph } from "./marks.js";
import { logTicks, sizeAxis, ticks, valueAxis } from "./scales.js";
import { table } from "./table.js";

/** All charts of a group, with a legend whose buttons hide series. */
export function curves(group, onpick) {
  const hidden = new Set();
  const charts = h("div", { class: "charts" });
  const draw = () => {
    const cells = group.cells.filter((cell) => !hidden.has(cell.series));
    const charted = group.quantities.filter((quantity) => quantity.charted);
    const panels = charted.map((quantity) => sizePanel(group, cells, quantity, onpick));
    fill(charts, panels, frontierPanel(group, cells, onpick));
  };
  draw();
  return [legend(group, hidden, draw), charts];
}

function legend(group, hidden, draw) {
  const toggle = (event, series) => {
    if (!hidden.delete(series)) hidden.add(series);
    event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(series)));
    draw();
  };
  const entries = seriesOf(group.cells).map((cell) => {
    const mark = glyph(cell);
    const props = { class: `legend-entry ${classOf(cell)}`, "aria-pressed": "true" };
    return button([mark, h("bdi", {}, visible(cell.seriesLabel))], (event) => toggle(event, cell.series), props);
  });
  return h("div", { class: "legend", role: "group", "aria-label": "Series: press to hide or show" }, entries);
}

function seriesOf(cells) {
  return [...new Map(cells.map((cell) => [cell.series, cell])).values()];
}

function panel(name, heading, note, picture, rows) {
  const more = h("details", {}, h("summary", {}, "Figures as a table"));
  more.addEventListener("toggle", () => more.open && more.children.length === 1 && more.append(rows()), { once: true });
  const caption = h("figcaption", {}, h("h3", {}, visible(heading)), note ? h("p", { class: "note" }, note) : null);
  return h("figure", { class: "panel", "data-chart": name }, caption, picture, more);
}

function sizePanel(group, cells, quantity, onpick) {
  const measured = cells.filter((cell) => cell.estimates[quantity.name]);
  const points = measured.filter((cell) => cell.size !== null).map((cell) => point(group, cell, quantity));
  points.sort((a, b) => a.series - b.series || a.x - b.x);
  const bands = measured.filter((cell) => cell.size === null).map((cell) => point(group, cell, quantity));
  const sizes = [...new Set(points.map((one) => one.x))].sort((a, b) => a - b);
  const { title, kind } = group.size;
  const spec = {
    name: quantity.name,
    title: quantity.heading,
    x: { title, ticks: sizes.map((size) => [size, format({ kind }, size)]), ...sizeAxis(sizes) },
    y: measureAxis(quantity, [...points, ...bands]),
    points,
    bands,
    joined: true,
    onpick,
  };
  const rows = () => figures(cells, [quantity]);
  const picture = measured.length ? chart(spec) : h("p", { class: "empty" }, "Not measured in this group.");
  return panel(quantity.name, quantity.heading, quantity.note, picture, rows);
}

function point(group, cell, quantity) {
  const [y, low, high] = cell.estimates[quantity.name];
  const lines = [`${quantity.title}: ${estimate(quantity, cell.estimates[quantity.name])}`, `n = ${cell.row.n}`];
  const { compacted, num_compacted } = cell.row;
  if (quantity === group.quantities[0] && num_compacted) lines.push(`cache compacted: ${estimate(quantity, compacted)}, n = ${number(num_compacted)}`);
  return { series: cell.series, look: classOf(cell), mark: cell.look, label: cell.label, x: cell.size, y, low, high, lines, cell: cell.number };
}

function measureAxis(quantity, points) {
  const title = quantity.heading;
  if (quantity.kind === "share") {
    return { title, low: -0.02, high: 1.04, log: false, ticks: [0, 0.25, 0.5, 0.75, 1].map((v) => [v, format(quantity, v)]) };
  }
  const high = Math.max(...points.map((one) => one.high ?? one.y), 0) || 1;
  const low = Math.min(0, ...points.map((one) => one.low ?? one.y));
  const found = ticks(high, 6, quantity.kind === "bytes");
  return { title, low, high: 1.06 * high, log: false, ticks: found.map((v) => [v, format(quantity, v)]) };
}

function frontierPanel(group, cells, onpick) {
  const quality = group.quantities[0];
  const memory = group.quantities.find((one) => one.name === group.memory);
  const measured = cells.filter((cell) => cell.estimates[quality.name] && cell.estimates[memory.name]);
  const points = measured.map((cell) => {
    const { y, low, high, ...rest } = point(group, cell, quality);
    const lines = [...rest.lines, `${memory.title}: ${estimate(memory, cell.estimates[memory.name])}`];
    return { ...rest, x: cell.estimates[memory.name][0], y, low, high, lines };
  });
  const axis = valueAxis(points.map((one) => one.x));
  const found = axis.log ? logTicks(axis.low, axis.high) : ticks(axis.high, 5, true);
  const best = quality.more_is_better ? "highest" : "lowest";
  const stairs = frontier(points, quality.more_is_better ? 1 : -1);
  const spec = {
    name: "frontier",
    title: `${quality.heading} against memory`,
    x: { title: memory.heading, ticks: found.map((v) => [v, format(memory, v)]), ...axis },
    y: measureAxis(quality, points),
    points: points.sort((a, b) => a.series - b.series || a.x - b.x),
    bands: [],
    stairs: stairs.map((one) => [one.x, one.y]),
    joined: false,
    onpick,
  };
  const note = `The steps join the cells that no other beats: ${best} ${nameOf(quality)} for their memory.`;
  const names = new Set(stairs.map((one) => one.cell));
  const rows = () => figures(measured, [quality, memory], ["on the frontier", (cell) => (names.has(cell.number) ? "yes" : "no")]);
  const picture = points.length ? chart(spec) : h("p", { class: "empty" }, "Not measured in this group.");
  return panel("frontier", `Frontier: ${nameOf(quality)} and memory`, note, picture, rows);
}

/** Name of a quantity within a sentence, without its unit. */
function nameOf(quantity) {
  const name = quantity.heading.split(",")[0];
  return /^[A-Z][a-z]/.test(name) ? name[0].toLowerCase() + name.slice(1) : name;
}

/** The points that no other beats in quality with as little memory, from small to large. */
export function frontier(points, sign) {
  const ordered = [...points].sort((a, b) => a.x - b.x || sign * (b.y - a.y));
  let best = -Infinity;
  return ordered.filter((one) => {
    if (sign * one.y <= best) return false;
    best = sign * one.y;
    return true;
  });
}

function figures(cells, quantities, more = null) {
  const columns = [
    { title: "cell", value: (cell) => cell.label, head: true },
    { title: "budget", value: (cell) => cell.budget, text: (cell) => (cell.budget === null ? "all" : format({}, cell.budget)), right: true },
    ...quantities.map((quantity) => ({
      title: quantity.title,
      value: (cell) => cell.estimates[quantity.name]?.[0] ?? null,
      text: (cell) => estimate(quantity, cell.estimates[quantity.name]),
      right: true,
    })),
  ];
  if (more) columns.push({ title: more[0], value: more[1] });
  return table("Figures", columns, cells);
}
