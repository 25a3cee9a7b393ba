// What became of a sample, in a mark and in words.

const VERDICTS = { 1: ["\u2713", "right"], 0: ["\u2717", "not right"], "?": ["?", "ungraded"], "-": ["\u00b7", "measured"] };

/** Mark and words of a sample: how it ended, and what it is worth. */
export function verdict(sample) {
  if (!sample) return { mark: " ", words: "not run", kind: "none" };
  const [mark, words] = VERDICTS[sample.verdict];
  if (sample.finish === "e") return { mark: "!", words: "failed", kind: "failed" };
  const kind = { 1: "right", 0: "wrong" }[sample.verdict] || "other";
  return { mark, words: sample.finish === "l" ? `${words}, cut off` : words, kind };
}
