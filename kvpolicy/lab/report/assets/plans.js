// Plans of the layers, and the manifest.

import { h, visible } from "./dom.js";
import { number, plural } from "./figures.js";
import { glyph } from "./marks.js";

/** The resolved plan of every cell, equal layers together. */
export function plans(group) {
  return group.cells.map((cell) => {
    const kinds = cell.layers.length === 1 ? "all layers alike" : plural(cell.layers.length, "kind of layers", "kinds of layers");
    const head = h("summary", {}, glyph(cell), h("bdi", {}, visible(cell.label)), h("span", { class: "note" }, ` ${kinds}`));
    const most = Math.max(0, ...cell.layers.map((one) => one.budget ?? 0));
    const rows = cell.layers.map((one) => h("tr", {}, h("th", { scope: "row" }, one.layers), h("td", { class: "right" }, budget(one, most)), h("td", { class: "right" }, number(one.buffer)), h("td", {}, stack(one.stack), more(one.more))));
    const titles = ["layers", "budget", "buffer", "stack, the later wrapping the earlier"];
    const names = titles.map((name, i) => h("th", { scope: "col", class: i === 1 || i === 2 ? "right" : null }, name));
    const whole = h("table", {}, h("caption", { class: "hidden" }, `Layers of ${visible(cell.label)}`), h("thead", {}, h("tr", {}, names)), h("tbody", {}, rows));
    const rest = [...more(cell.more), h("code", { class: "note" }, `plan ${visible(cell.plan)}`)];
    return h("details", { class: "plan" }, head, h("div", { class: "scroll", role: "region", "aria-label": `Layers of ${visible(cell.label)}`, tabindex: 0 }, whole), h("p", {}, rest));
  });
}

function budget(layer, most) {
  if (!layer.stack.length) return "no rows";
  if (layer.budget === null) return "all";
  const meter = most ? h("meter", { min: 0, max: most, value: layer.budget, "aria-hidden": "true" }) : null;
  return [meter, ` ${number(layer.budget)}`];
}

function stack(policies) {
  return h("ol", { class: "stack" }, policies.map(({ policy, knobs }) => h("li", {}, h("strong", {}, visible(policy)), Object.entries(knobs).map(([name, value]) => h("code", {}, visible(`${name}=${asText(value)}`))))));
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function more(pairs) {
  return Object.entries(pairs).map(([name, value]) => h("code", {}, visible(`${name}=${asText(value)}`)));
}

/** Settings of the group, and of each run: versions, commands, sessions. */
export function manifest(group, runs) {
  const settings = h("dl", { class: "facts" }, group.settings.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("bdi", {}, visible(value))))));
  const mine = runs.filter((run) => run.version === group.version && run.groups.some((id) => group.groups.includes(id)));
  return [settings, mine.map(runDetails)];
}

function runDetails(run) {
  const head = h("summary", {}, h("bdi", {}, visible(run.name)), h("span", { class: "note" }, ` ${visible(run.folder)}, kvpolicy ${visible(run.version)}, ${plural(run.sessions.length, "session")}`));
  return h("details", { class: "plan", open: true }, head, h("ol", { class: "sessions" }, run.sessions.map(session)));
}

function session(facts) {
  return h("li", {}, h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, h(name === "command" ? "code" : "bdi", {}, visible(value)))))));
}
