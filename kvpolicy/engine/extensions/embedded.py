"""Embedded: chunks of prompts with images enter the decoder with their embeddings.

Where tokens of an image attend to each other in both directions, an image enters in one chunk.
"""

from collections import abc

from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.errors import ModelError
from kvpolicy.model.embedded import EmbeddedPrompt


class Embedded(Extension):
    """Cuts what a prompt has for the decoder into its chunks."""

    def __init__(self, chunk: int) -> None:
        """Take the most prompt tokens of one sequence in one forward."""
        self._chunk = chunk

    def hold(self, seq: Sequence, prompt: EmbeddedPrompt) -> None:
        """Keep what new tokens of a sequence have for the decoder until they are in."""
        seen, offset = (int(one[seq.slot]) for one in (self.cache.seq_len, self.cache.rope_offset))
        seq.embedded = prompt.after(seen, offset)
        self.cache.rope_offset[seq.slot] = seq.embedded.rope_offset

    def room_needed(self, seq: Sequence) -> int:
        """Tokens up to the next place at which the prompt may be cut."""
        seen = int(self.cache.seq_len[seq.slot])
        return 1 if seq.embedded is None else seq.embedded.first_cut(seen) - seen

    def chunk_limit(self, seq: Sequence) -> int:
        """As many as fit up to a place at which the prompt may be cut."""
        if seq.embedded is None or seq.embedded.ahead is None:
            return ANY
        seen, most = int(self.cache.seq_len[seq.slot]), int(self.cache.most_new([seq.slot])[0])
        length = seq.embedded.last_cut(seen + min(most, self._chunk)) - seen
        if length > 0:
            return length
        msg = (
            f"{self.room_needed(seq)} tokens of an image attend to each other and enter together, "
            f"and a chunk has {min(most, self._chunk)} at most; give the plan a buffer of as many "
            "rows as the image has tokens, and the cache such a chunk"
        )
        raise ModelError(msg)

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
        self._let_go(
            seq for seq, is_in in zip(step.sequences, step.completes, strict=True) if is_in
        )

    def finish(self, seq: Sequence) -> None:
        """Let go of what the prompt has for the decoder."""
        self._let_go([seq])

    def _let_go(self, sequences: abc.Iterable[Sequence]) -> None:
        for seq in sequences:
            seq.embedded = None
