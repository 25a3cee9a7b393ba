// The tokens that each compaction kept, for samples that were recorded.

import { fill, h } from "./dom.js";
import { openBlock } from "./data.js";
import { keptView } from "./kept.js";

let shown = null;

/** Show what is recorded of an entry under some cells; nothing if nothing is. */
export async function kept(place, group, cells, entry) {
  const found = cells.filter((cell) => cell.kept && entry in cell.kept);
  if (!found.length) return;
  const records = await Promise.all(found.map((cell) => openBlock(cell.kept[entry])));
  const view = h("div");
  shown?.destroy();
  fill(place, h("h4", {}, "Tokens kept by each compaction"), view);
  shown = keptView(view, records, { labels: found.map((cell) => cell.label) });
}
