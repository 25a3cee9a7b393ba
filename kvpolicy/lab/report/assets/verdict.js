// Verdict of a sample as a mark and as text.

const VERDICTS = { 1: ["\u2713", "correct"], 0: ["\u2717", "wrong"], "?": ["?", "ungraded"], "-": ["\u00b7", "measured"] };

/** Mark, text and kind of a sample: how it ended, and its grade. */
export function verdict(sample) {
  if (!sample) return { mark: " ", text: "not run", kind: "none" };
  const [mark, text] = VERDICTS[sample.verdict];
  if (sample.finish === "e") return { mark: "!", text: "failed", kind: "failed" };
  const kind = { 1: "correct", 0: "wrong" }[sample.verdict] || "other";
  return { mark, text: sample.finish === "l" ? `${text}, truncated` : text, kind };
}
