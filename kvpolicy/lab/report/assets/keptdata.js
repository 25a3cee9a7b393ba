// A record of kept rows: which KV heads held which token, and when.
//
// Time is counted in tokens of the sequence. A row of position p joins when there are p + 1 tokens
// and leaves with the compaction that evicts it, or when the sliding window has passed it; so one
// number describes each row: the time at which it left.

const STAYED = 2 ** 31 - 1;
// As kvpolicy/lab/report/kept_rows.py: one letter for each KV head of each position.
const FIRST_LETTER = 0x23;
const SURROGATES = 0xd800;
const NUM_SURROGATES = 0x800;

/** A record, plain as in kept.jsonl or compact as in a page, ready to be counted. */
export function readKept(record) {
  const numTokens = record.tokens.length;
  return {
    tokens: record.tokens,
    numPrompt: record.num_prompt,
    end: Math.max(numTokens - 1, 0), // the last token is drawn and never enters the cache
    layers: record.layers.map((layer) => {
      const left = unpack(layer, numTokens);
      const heads = numTokens ? left.length / numTokens : 0;
      return { layer: layer.layer, window: layer.window ?? null, at: layer.at, heads, left, leaves: leaves(layer, left, heads) };
    }),
  };
}

/** For each position, for each head: the compaction at which its row left, -1 for none. */
export function unpack(layer, numTokens) {
  if (typeof layer.left_at === "string") {
    const letters = layer.left_at;
    const left = new Int32Array(letters.length);
    for (let i = 0; i < letters.length; i++) {
      const code = letters.charCodeAt(i);
      left[i] = code - FIRST_LETTER - 1 - (code > SURROGATES ? NUM_SURROGATES : 0);
    }
    return left;
  }
  const heads = layer.left_at.length;
  const left = new Int32Array(heads * numTokens);
  layer.left_at.forEach((row, head) => row.forEach((step, p) => (left[p * heads + head] = step)));
  return left;
}

function leaves({ at, window }, left, heads) {
  const found = new Int32Array(left.length);
  for (let i = 0; i < left.length; i++) {
    const taken = left[i] < 0 ? STAYED : at[left[i]];
    const slid = window ? Math.floor(i / heads) + window : STAYED;
    found[i] = Math.min(taken, slid);
  }
  return found;
}

/** The layers and heads that a choice is about; null stands for all. */
export function chosen(kept, { layer, head }) {
  const layers = kept.layers.filter((one) => (layer === null || one.layer === layer) && (head === null || head < one.heads));
  const [first, last] = head === null ? [0, Infinity] : [head, head + 1];
  const parts = layers.map((one) => ({ ...one, first, last: Math.min(last, one.heads) }));
  return { parts, total: parts.reduce((sum, part) => sum + part.last - part.first, 0) };
}

/** Tokens in the sequence at each compaction of the chosen layers, and at the end; rising. */
export function timesOf(kept, choice) {
  const times = new Set(chosen(kept, choice).parts.flatMap((part) => part.at));
  return [...times.add(kept.end)].sort((a, b) => a - b);
}

/** How many of the chosen heads hold each token when there are `time` tokens. */
export function countsAt(kept, { parts }, time) {
  const counts = new Int32Array(kept.tokens.length);
  const joined = Math.min(time, kept.end);
  for (const { leaves: gone, heads, first, last } of parts) {
    for (let p = 0; p < joined; p++) {
      for (let i = p * heads + first; i < p * heads + last; i++) counts[p] += gone[i] > time;
    }
  }
  return counts;
}

/** The same at many times at once: one row of counts after another, -1 where no token is yet. */
export function survival(kept, { parts }, times) {
  const width = kept.tokens.length;
  const rows = times.length;
  const after = new Int32Array((times.at(-1) ?? 0) + 2).fill(rows); // first row at or after a time
  for (let row = rows - 1, time = after.length - 1; time >= 0; time--) {
    while (row > 0 && times[row - 1] >= time) row--;
    after[time] = times[row] >= time ? row : rows;
  }
  const from = (time) => (time < after.length ? after[time] : rows);
  const counts = new Int32Array((rows + 1) * width);
  for (const { leaves: gone, heads, first, last } of parts) {
    for (let p = 0; p < kept.end; p++) {
      const joins = from(p + 1);
      for (let i = p * heads + first; i < p * heads + last; i++) {
        counts[joins * width + p]++;
        counts[Math.max(joins, from(gone[i])) * width + p]--;
      }
    }
  }
  for (let i = width; i < counts.length; i++) counts[i] += counts[i - width];
  for (let row = 0; row < rows; row++) {
    counts.fill(-1, row * width + Math.min(times[row], kept.end), (row + 1) * width);
  }
  return counts.subarray(0, rows * width);
}

/** What became of one token: for each chosen layer and head, when it left; null if it stayed. */
export function fates({ parts }, p) {
  return parts.flatMap((part) =>
    Array.from({ length: part.last - part.first }, (_, i) => {
      const place = p * part.heads + part.first + i;
      const left = part.leaves[place];
      const step = part.left[place];
      const slid = part.window !== null && left < (step < 0 ? STAYED : part.at[step]);
      return { layer: part.layer, head: part.first + i, left: left === STAYED ? null : left, step: slid ? null : step };
    }),
  );
}

const LEVELS = 8;

/** The shade of a count: 0 for none, 8 for all, and the same for as many heads everywhere. */
export function levelOf(count, total) {
  if (!total) return 0; // the layer has no such head
  return count >= total ? LEVELS : Math.min(Math.ceil((LEVELS * count) / total), LEVELS - 1);
}
