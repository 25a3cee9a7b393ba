// Overview: how much was run, the table, the breakdown, failures.

import { button, fill, h, select, visible } from "./dom.js";
import { estimate, format, interval, number, plural, share } from "./figures.js";
import { glyph } from "./marks.js";
import { table } from "./table.js";

/** The numbers at the top. */
export function summary(group) {
  const sum = (name) => group.cells.reduce((total, cell) => total + cell.row[name], 0);
  const done = sum("n");
  const tiles = [
    ["cells", number(group.cells.length), plural(new Set(group.cells.map((c) => c.series)).size, "series", "series")],
    ["samples", number(done), done < group.num_expected ? `of ${number(group.num_expected)}: not complete` : sizes(group.cells)],
    ["truncated", number(sum("num_truncated")), `at ${plural(group.max_new_tokens, "token")}`],
    ["failed", number(sum("num_errors")), group.graded ? "counted as wrong" : "not counted in the metric"],
  ];
  if (group.graded) tiles.push(["ungraded", number(sum("num_ungraded")), "the grader gave no verdict"]);
  const list = tiles.map(([name, value, note]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "note" }, note)));
  return h("dl", { class: "tiles" }, list);
}

function sizes(cells) {
  const [least, most] = [Math.min, Math.max].map((of) => of(...cells.map((cell) => cell.row.n)));
  return least === most ? `${number(most)} in each cell` : `${number(least)} to ${number(most)} in a cell`;
}

/** The table of all cells. */
export function results(group, onpick) {
  const measured = group.quantities.map((quantity) => ({
    title: quantity.title,
    value: (cell) => cell.estimates[quantity.name]?.[0] ?? null,
    node: (cell) => figure(quantity, cell.estimates[quantity.name]),
    right: true,
  }));
  const first = group.quantities[0];
  const points = first.kind === "share" ? { kind: "points" } : first;
  const columns = [
    { title: "series", value: (cell) => cell.seriesLabel, head: true, node: (cell) => named(cell, onpick) },
    { title: "budget", value: (cell) => cell.budget ?? Infinity, text: (cell) => (cell.budget === null ? "all" : number(cell.budget)), right: true },
    ...(group.size.kind === "bytes" ? [{ title: "bytes/seq", value: (cell) => cell.size, text: (cell) => format(group.size, cell.size), right: true }] : []),
    { title: "buffer", value: (cell) => cell.buffer, text: (cell) => number(cell.buffer), right: true },
    measured[0],
    { title: "compacted (n)", value: (cell) => cell.row.compacted?.[0] ?? null, node: (cell) => compacted(first, cell.row), right: true },
    ...measured.slice(1),
    { title: "difference", value: (cell) => cell.row.difference?.[0] ?? null, node: (cell) => figure(points, cell.row.difference), right: true },
    { title: "n", value: (cell) => cell.row.n, text: (cell) => number(cell.row.n), right: true },
    { title: "truncated", value: (cell) => cell.row.num_truncated, text: (cell) => `${number(cell.row.num_truncated)} (${share(cell.row.num_truncated / cell.row.n)})`, right: true },
    { title: "failed", value: (cell) => cell.row.num_errors, text: (cell) => number(cell.row.num_errors), right: true },
    { title: "ungraded", value: (cell) => cell.row.num_ungraded, text: (cell) => number(cell.row.num_ungraded), right: true },
    { title: "compactions", value: (cell) => cell.row.compactions, text: (cell) => number(cell.row.compactions), right: true },
    { title: "policy time", value: (cell) => cell.row.policy_share, text: (cell) => share(cell.row.policy_share), right: true },
  ];
  if (!group.cells.some((cell) => Object.keys(cell.knobs).length)) return table("Cells", columns, group.cells);
  const knobs = (cell) => Object.entries(cell.knobs).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  const lines = (cell) => knobs(cell).map((knob) => h("div", {}, visible(knob)));
  columns.splice(3, 0, { title: "knobs", value: (cell) => knobs(cell).join(", "), node: lines, wide: true });
  return table("Cells", columns, group.cells);
}

function named(cell, onpick) {
  const props = { class: "link", title: "Show its samples" };
  return [glyph(cell), button(visible(cell.seriesLabel), () => onpick(cell.number), props)];
}

function figure(quantity, found) {
  if (!found) return "\u2013";
  if (quantity.kind === "points") return [signed(found[0]), h("small", {}, ` ${signed(found[1])} \u2013 ${signed(found[2])}`)];
  return [format(quantity, found[0]), found[1] === null ? null : h("small", {}, ` ${interval(quantity, found)}`)];
}

/** The first quantity over the samples whose cache was compacted, and their number. */
function compacted(quantity, row) {
  if (!row.num_compacted) return "\u2013";
  const [value, ...rest] = [figure(quantity, row.compacted)].flat();
  return [value, ` (${number(row.num_compacted)})`, ...rest];
}

const signed = (value) => `${value < 0 ? "\u2212" : "+"}${Math.abs(100 * value).toFixed(0)}`;

/** The first quantity by difficulty, or by other facets of the items or parts of samples. */
export function breakdown(group) {
  const left = group.left_out.map(({ name, num }) => `${visible(name)} (${number(num)})`);
  const note = left.length ? h("p", { class: "note" }, `Not shown, as they have too many values for a table: ${left.join(", ")}.`) : null;
  if (!group.facets.length) return [note ?? h("p", { class: "empty" }, "The items of this task do not say in what they differ.")];
  const place = h("div");
  const show = (number) => fill(place, facetTable(group, group.facets[number]));
  show(0);
  const names = group.facets.map((facet, i) => [String(i), visible(facet.name)]);
  return [select("By", names, "0", show, { id: "facet" }), place, note];
}

function facetTable(group, facet) {
  const quantity = group.quantities[0];
  const found = (cell, i) => cell.facets[facet.name][i];
  const columns = facet.values.map((value, i) => ({
    title: visible(value),
    value: (cell) => found(cell, i)?.estimate?.[0] ?? null,
    node: (cell) => shade(quantity, found(cell, i)),
    right: true,
  }));
  const head = { title: "cell", value: (cell) => cell.label, head: true };
  return table(`${quantity.heading} by ${visible(facet.name)}`, [head, ...columns], group.cells);
}

function shade(quantity, found) {
  if (!found || !found.estimate) return "\u2013";
  const level = quantity.kind === "share" ? `level-${Math.round(5 * found.estimate[0])}` : "";
  const value = h("strong", {}, format(quantity, found.estimate[0]));
  return h("span", { class: `shade ${level}`, title: estimate(quantity, found.estimate) }, value, h("small", {}, `${interval(quantity, found.estimate)} n ${found.n}`));
}

/** What failed, was truncated or could not be graded, by cell; a click shows the samples. */
export function failures(group, onfilter) {
  const cells = group.cells.filter((cell) => cell.row.num_errors + cell.row.num_truncated + cell.row.num_ungraded);
  if (!cells.length) return [h("p", {}, `Every sample ended by itself${group.graded ? " and has a verdict" : ""}.`)];
  const count = (name, filter) => ({
    title: filter,
    value: (cell) => cell.row[name],
    node: (cell) => (cell.row[name] ? button(number(cell.row[name]), () => onfilter(cell.number, filter), { class: "link" }) : "0"),
    right: true,
  });
  const columns = [
    { title: "cell", value: (cell) => cell.label, head: true },
    count("num_errors", "failed"),
    count("num_truncated", "truncated"),
    count("num_ungraded", "ungraded"),
  ];
  return [table("Failures", columns, cells), messages(cells)];
}

function messages(cells) {
  const found = cells.flatMap((cell) => cell.problems.map(([text, n]) => ({ cell: cell.label, text, n })));
  if (!found.length) return null;
  const columns = [
    { title: "cell", value: (one) => one.cell, head: true },
    { title: "samples", value: (one) => one.n, right: true },
    { title: "message", value: (one) => one.text, wide: true },
  ];
  return table("Messages", columns, found);
}
