// Tables that can be sorted by any column.

import { button, fill, h, visible } from "./dom.js";

/**
 * columns: [{title, value(row), text(row)?, right?, wide?, head?, node(row)?}, ...]
 * `value` is what is sorted by; `text`, or else `node`, is what is shown.
 */
export function table(caption, columns, rows) {
  const body = h("tbody");
  const heads = columns.map((column, i) => {
    const head = h("th", { scope: "col", class: column.right ? "right" : null, "aria-sort": "none" });
    head.append(button([visible(column.title), h("span", { class: "arrow", "aria-hidden": "true" })], () => sort(i)));
    return head;
  });
  const sort = (number) => {
    const falls = heads[number].getAttribute("aria-sort") === "ascending";
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== number ? "none" : falls ? "descending" : "ascending"));
    show([...rows].sort(by(columns[number].value, falls ? -1 : 1)));
  };
  const show = (ordered) => fill(body, ordered.map((row) => h("tr", {}, columns.map((column) => cell(column, row)))));
  show(rows);
  const whole = h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, heads)), body);
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 }, whole);
}

function cell(column, row) {
  const content = column.node ? column.node(row) : visible(column.text ? column.text(row) : (column.value(row) ?? "\u2013"));
  const props = { class: column.right ? "right" : column.wide ? "wide" : null };
  return column.head ? h("th", { scope: "row", ...props }, h("bdi", {}, content)) : h("td", props, content);
}

/** An order of rows; what has no value comes last either way. */
function by(value, sign) {
  return (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
}
