// The page: sections are filled for one group at a time.

import { byId, fill, h, select, visible } from "./dom.js";
import { prepare, readData } from "./data.js";
import { breakdown, failures, results, summary } from "./overview.js";
import { browser } from "./browser.js";
import { forget } from "./keptpart.js";
import { curves } from "./curves.js";
import { manifest, plans } from "./plans.js";
import { seeds } from "./seeds.js";
import { nameKinds } from "./trace.js";
import { themeButton } from "./theme.js";

const data = readData();
const groups = data.groups.map((group) => prepare(group, data.series, data.looks));

function show(group) {
  nameKinds(group);
  forget();
  const samples = group.pooled ? seeds(group, groups) : browser(group);
  const goTo = (cell, filter) => {
    samples.pick(cell, filter);
    byId("samples").scrollIntoView();
    byId("samples-list")?.focus({ preventScroll: true });
  };
  fill(byId("group-notes"), group.notes.map((note) => h("p", { class: "notice" }, visible(note))));
  fill(byId("summary-body"), summary(group));
  fill(byId("curves-body"), curves(group, goTo));
  fill(byId("table-body"), results(group, goTo));
  fill(byId("difficulty-body"), breakdown(group));
  fill(byId("failures-body"), failures(group, goTo));
  fill(byId("samples-body"), samples.element);
  fill(byId("plans-body"), plans(group));
  fill(byId("manifest-body"), manifest(group, data.runs));
  return samples.begin();
}

const names = groups.map((group, i) => [String(i), visible(group.label)]);
fill(byId("tools"), names.length > 1 ? select("Group", names, "0", (i) => show(groups[Number(i)]), { id: "group" }) : null, themeButton());
show(groups[0]).then(() => {
  performance.mark("ready");
  document.documentElement.setAttribute("data-ready", "");
});
