// The tokens that each compaction kept, for samples that were recorded.

import { fill, h, visible } from "./dom.js";
import { openBlock } from "./data.js";
import { keptView } from "./kept.js";
import { glyph } from "./marks.js";

let shown = null;

/** Show the records of an entry for some cells, if there are any. */
export async function kept(place, cells, entry) {
  forget();
  const found = cells.filter((cell) => entry in cell.kept);
  if (!found.length) return;
  const records = await Promise.all(found.map((cell) => openBlock(cell.kept[entry])));
  if (!place.isConnected) return; // another sample was quicker, and has the page
  const view = h("div");
  fill(place, h("h4", {}, "Tokens kept by each compaction"), view);
  shown = keptView(view, records, { labels: found.map((cell) => visible(cell.label)) });
  view.querySelectorAll(".kept-panel h5").forEach((title, i) => title.prepend(glyph(found[i])));
}

/** Stop whatever plays or listens in the view that is shown: its sample leaves the page. */
export function forget() {
  shown?.destroy();
  shown = null;
}
