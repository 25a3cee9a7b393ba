// The kept-token view as text: for readers who do not see shades, and for numbers.

import { visible } from "./dom.js";
import { fates } from "./keptdata.js";

const MOST_FATES = 16;
const number = (value) => value.toLocaleString("en");
const plural = (count, one) => `${number(count)} ${one}${count === 1 ? "" : "s"}`;

/** The heads that are counted: "2 KV heads", "KV head 1", "4 layers × 2 KV heads". */
export function scope({ parts, total }, { layer, head }) {
  if (layer !== null) return head === null ? plural(total, "KV head") : `KV head ${head}`;
  const layers = plural(parts.length, "layer");
  if (head !== null) return `KV head ${head} of ${layers}`;
  return parts.length && total % parts.length === 0 ? `${layers} \u00d7 ${plural(total / parts.length, "KV head")}` : `${total} KV heads of ${layers}`;
}

/** The state of the generation at a time. */
export function moment(kept, steps, time) {
  if (!kept.tokens.length) return "nothing was generated";
  const before = steps.filter((one) => one < kept.end);
  const done = before.filter((one) => one <= time).length;
  if (time >= kept.end) return `at the end: ${number(kept.end)} tokens, ${plural(before.length, "compaction")}`;
  const now = `${number(time)} tokens`;
  return done ? `after compaction ${number(done)} of ${number(before.length)}: ${now}` : `${now}, not compacted yet`;
}

/** How many rows are held. */
export function summary(kept, counts, total, time) {
  const joined = Math.min(time, kept.end);
  let [rows, all, none] = [0, 0, 0];
  for (let p = 0; p < joined; p++) {
    rows += counts[p];
    all += counts[p] === total;
    none += counts[p] === 0;
  }
  if (!joined || !total) return "";
  const share = Math.round((100 * rows) / (joined * total));
  const some = joined - all - none;
  const partly = total > 1 ? `, ${number(some)} by some` : "";
  return `${share}% of the rows held: ${number(all)} tokens by ${total > 1 ? "all heads" : "the head"}${partly}, ${number(none)} by none`;
}

/** Description of one token, as lines. */
export function describe(kept, choice, counts, p, time) {
  const where = p < kept.numPrompt ? "prompt" : `answer, token ${number(p - kept.numPrompt + 1)}`;
  const lines = [`${quoted(kept.tokens[p])} \u00b7 position ${number(p)} (${where})`];
  if (p >= Math.min(time, kept.end)) {
    const never = p === kept.end;
    return [...lines, never ? "the last token: sampled, and never in the cache" : "not in the sequence yet at this step"];
  }
  lines.push(`held by ${number(counts[p])} of ${number(choice.total)} KV heads`);
  const found = fates(choice, p);
  const several = new Set(found.map((fate) => fate.layer)).size > 1;
  if (found.length <= MOST_FATES) {
    for (const fate of found) lines.push(`${several ? `layer ${fate.layer}, ` : ""}head ${fate.head}: ${when(fate)}`);
    return lines;
  }
  const left = found.filter((fate) => fate.left !== null);
  const times = left.map((fate) => fate.left);
  if (left.length) lines.push(`leaves ${plural(left.length, "head")} between ${number(least(times))} and ${number(-least(times.map((one) => -one)))} tokens`);
  lines.push(`stays in ${plural(found.length - left.length, "head")} to the end`);
  return lines;
}

const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b));

function when({ left, step }) {
  if (left === null) return "stays to the end";
  const how = step === null ? "slid out of the window" : `compaction ${step + 1}`;
  return `left at ${number(left)} tokens (${how})`;
}

function quoted(text) {
  const seen = visible(text).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return text === "" ? "(part of a character)" : `\u201c${seen}\u201d`;
}
