// The samples of pooled seeds: the browser of one seed at a time.

import { browser } from "./browser.js";
import { fill, h, select } from "./dom.js";
import { forget } from "./keptpart.js";

const COUNTS = { failed: "num_errors", truncated: "num_truncated", ungraded: "num_ungraded" };

/** Like `browser` for a group of several seeds; `groups`: all groups of the page. */
export function seeds(pooled, groups) {
  const singles = groups.filter((one) => !one.pooled && one.version === pooled.version && one.groups.every((id) => pooled.groups.includes(id)));
  const place = h("div");
  let at = 0;
  let samples = null;

  function show(number) {
    forget();
    at = number;
    samples = browser(singles[at]);
    const names = singles.map((one, i) => [String(i), one.seeds.join(", ")]);
    const choice = select("Seed", names, String(at), (i) => show(Number(i)), { id: "seed" });
    fill(place, h("div", { class: "fields" }, choice), samples.element);
    return samples.begin();
  }

  const cellIn = (single, number) => single.cells.find((cell) => cell.plan === pooled.cells[number].plan);
  const has = (single, number, filter) => {
    const cell = cellIn(single, number);
    return cell !== undefined && (!(filter in COUNTS) || cell.row[COUNTS[filter]] > 0);
  };
  const pick = async (number, filter = "all") => {
    const found = [at, ...singles.keys()].find((i) => has(singles[i], number, filter)) ?? at;
    if (found !== at) await show(found);
    const cell = cellIn(singles[at], number);
    return cell && samples.pick(cell.number, filter);
  };
  return { element: place, pick, begin: () => show(at) };
}
