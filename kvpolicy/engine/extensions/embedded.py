"""Embedded: chunks of prompts with images enter the decoder with their embeddings."""

from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step


class Embedded(Extension):
    """Cuts what a prompt has for the decoder into its chunks."""

    def before(self, step: Step) -> None:
        """Give a step what belongs to its tokens."""
        sequences = step.sequences
        if any(seq.embedded is not None for seq in sequences):
            seen = self.cache.seq_len[step.slots].tolist()
            step.embedded = [
                None if seq.embedded is None else seq.embedded.part(first, length)
                for seq, first, length in zip(sequences, seen, step.lengths, strict=True)
            ]

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Let go of what prompts have for the decoder once they are in."""
        for seq, is_last in zip(step.sequences, step.completes, strict=True):
            if is_last and seq.embedded is not None:
                seq.embedded = None

    def finish(self, seq: Sequence) -> None:
        """Let go of what the prompt has for the decoder."""
        seq.embedded = None
