"""Embedded: chunks of prompts with images enter the decoder with their embeddings.

The model embeds the images of a request once, for its whole prompt, when it is given a slot. Where
tokens of an image attend to each other in both directions, an image enters in one chunk.
"""

from collections import abc

import numpy as np
import torch

from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.embedded import EmbeddedPrompt


class Embedded(Extension):
    """Cuts what a prompt has for the decoder into its chunks."""

    def __init__(self, adapter: ModelAdapter, chunk: int) -> None:
        """Take the model, and the most prompt tokens of one sequence in one forward."""
        self._adapter, self._chunk = adapter, chunk

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Embed the images of requests; one whose images the model does not take ends."""
        for seq in group:
            if seq.request.images is not None:
                try:
                    self.hold(seq, self._embed(seq))
                except ModelError as error:
                    seq.fail(str(error))

    def _embed(self, seq: Sequence) -> EmbeddedPrompt:
        adapter, images = self._adapter, seq.request.images
        assert adapter.embedder is not None, "arrivals see to it"
        assert images is not None
        device, dtype = adapter.device, adapter.model.dtype
        ids = torch.tensor([seq.prompt], device=device)
        given = {
            name: one.to(device, dtype if one.is_floating_point() else one.dtype)
            for name, one in images.items()
        }
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # What is kept of a prompt outlives the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            (prompt,) = adapter.embedder(given, np.ones((1, len(seq.prompt)), dtype=bool))
        return prompt

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """It has nothing to do with decode steps."""
        return ANY

    def hold(self, seq: Sequence, prompt: EmbeddedPrompt) -> None:
        """Keep what new tokens of a sequence have for the decoder until they are in."""
        seen, offset = (int(one[seq.slot]) for one in (self.cache.seq_len, self.cache.rope_offset))
        seq.embedded = prompt.after(seen, offset)
        self.cache.rope_offset[seq.slot] = seq.embedded.rope_offset

    def room_needed(self, seq: Sequence) -> int:
        """Tokens up to the next place at which the prompt may be cut."""
        seen = int(self.cache.seq_len[seq.slot])
        return 1 if seq.embedded is None else seq.embedded.first_cut(seen) - seen

    def ready(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """End those whose next image has more tokens than there is ever room for."""
        for seq in sequences:
            if self.chunk_limit(seq) <= 0:
                seq.fail(
                    f"{self.room_needed(seq)} tokens of an image attend to each other and enter "
                    f"together, and a chunk has {self._most_new(seq)} at most; give the plan a "
                    "buffer of as many rows as the image has tokens, and the engine or the cache "
                    "such a chunk"
                )
        return [seq for seq in sequences if seq.finish_reason is None]

    def chunk_limit(self, seq: Sequence) -> int:
        """As many as fit up to a place at which the prompt may be cut; 0: not even to the next."""
        if seq.embedded is None or seq.embedded.ahead is None:
            return ANY
        seen = int(self.cache.seq_len[seq.slot])
        return seq.embedded.last_cut(seen + self._most_new(seq)) - seen

    def _most_new(self, seq: Sequence) -> int:
        return min(int(self.cache.most_new([seq.slot])[0]), self._chunk)

    def before(self, step: Step) -> None:
        """Give a step what belongs to its tokens."""
        sequences = () if step.is_decode else step.sequences
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
