// Data of the page: one JSON text, and blocks of texts that are opened on demand.

const opened = new Map();

/** The data of the report, parsed once. */
export function readData() {
  return JSON.parse(document.getElementById("report-data").textContent);
}

/** A block of texts: compressed JSON, inflated at most once. Returns a promise. */
export function openBlock(number) {
  if (!opened.has(number)) opened.set(number, inflate(`block-${number}`));
  return opened.get(number);
}

async function inflate(id) {
  if (!("DecompressionStream" in window)) {
    throw new Error("This browser is too old to open the traces: it lacks DecompressionStream (2023).");
  }
  const packed = atob(document.getElementById(id).textContent);
  const raw = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** A group with lookup tables. */
export function prepare(group, series, looks) {
  const attempts = group.attempts;
  for (const [number, cell] of group.cells.entries()) {
    cell.number = number;
    cell.seriesLabel = series[cell.series];
    cell.look = looks[cell.series];
    cell.rows = new Map(cell.samples.place.map((place, row) => [place * attempts + cell.samples.attempt[row], row]));
  }
  const entries = new Set(group.cells.flatMap((cell) => [...cell.rows.keys()]));
  group.entries = [...entries].sort((a, b) => a - b);
  return group;
}

/** One sample of a cell as an object, or null. `entry`: index of the item * attempts + attempt. */
export function sampleOf(cell, entry) {
  const row = cell.rows.get(entry);
  if (row === undefined) return null;
  const { verdict, finish, tokens, prompt, compactions, evicted, bytes, seconds } = cell.samples;
  return {
    row,
    verdict: verdict[row],
    finish: finish[row],
    tokens: tokens[row],
    prompt: prompt[row],
    compactions: compactions[row],
    evicted: evicted[row],
    bytes: bytes[row],
    seconds: seconds[row],
  };
}

/** Index of the value of a facet for an item; undefined if the item has none. */
export function facetOf(item, facet) {
  return Object.hasOwn(item.facets, facet.name) ? item.facets[facet.name] : undefined;
}

/** The facets of an item as text, including those left out of tables. */
export function formatFacets(group, item) {
  const known = group.facets.filter((facet) => facetOf(item, facet) !== undefined);
  return [...known.map((facet) => `${facet.name} ${facet.values[facetOf(item, facet)]}`), ...item.others];
}

/** The texts of an item: {prompt, answer, reference, cells: {cell: {attempt: {...}}}}. */
export async function textsOf(group, place) {
  const found = group.blocks.findLast((block) => block.first <= place);
  return (await openBlock(found.block))[place - found.first];
}
