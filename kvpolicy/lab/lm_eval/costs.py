"""What the requests of a task have cost, beside what the harness makes of their answers."""

from typing import Any

import attrs

from kvpolicy.engine.results import Result


@attrs.define
class Cost:
    """What the sequences of one task have cost.

    Attributes:
        num_sequences: Sequences that went through the engine. Continuations that differ in their
            last token only are scored in one.
        prompt_tokens: Tokens of their prompts.
        new_tokens: Tokens generated, or led along.
        num_cut_off: Generations that did not end by themselves.
        num_shortened: Prompts that lost their beginning, to leave room for the generation in
            the model's positions.
        compactions: Times at which at least one layer of a sequence was compacted.
        rows_evicted: Rows that left, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held for one sequence.
        peak_bytes: The most bytes of keys and values one sequence held, summed over layers.
    """

    num_sequences: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    num_cut_off: int = 0
    num_shortened: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0

    def add(self, result: Result, *, cut_off: bool = False, shortened: bool = False) -> None:
        """Count one sequence.

        Args:
            result: How it ended.
            cut_off: Whether it should have gone on.
            shortened: Whether its prompt lost its beginning.
        """
        self.num_sequences += 1
        self.prompt_tokens += result.prompt_len
        self.new_tokens += len(result.tokens)
        self.num_cut_off += cut_off
        self.num_shortened += shortened
        self.compactions += result.compactions
        self.rows_evicted += result.rows_evicted
        self.peak_rows = max(self.peak_rows, result.peak_rows)
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self)
