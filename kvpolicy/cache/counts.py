"""What the host knows of the slots of a cache, in numbers."""

from collections.abc import Sequence

import numpy as np


class Counts:
    """What the host knows of the slots of a cache; attributes as in `KVCache`.

    The arrays are changed in place, never replaced: a cache and its layouts share them.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        # Memory that nothing touches yet: slabs for too many slots are refused before.
        self.rows = np.zeros((num_layers, num_slots), dtype=np.int64)
        self.prompt_rows = np.zeros((num_layers, num_slots), dtype=np.int64)
        self.compacted_at = np.zeros((num_layers, num_slots), dtype=np.int64)
        self.num_reserved = np.zeros((num_layers, num_slots), dtype=np.int64)
        self.seq_len = np.zeros(num_slots, dtype=np.int64)
        self.prompt_len = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.rope_offset = np.zeros(num_slots, dtype=np.int64)
        self.capacity = np.zeros(num_layers, dtype=np.int64)
        self.transient_bytes = 0

    @property
    def per_slot(self) -> list[np.ndarray]:
        """The numbers of each slot; the last axis is the slot."""
        of_layers = [self.rows, self.prompt_rows, self.compacted_at, self.num_reserved]
        of_slots = [self.seq_len, self.prompt_len, self.num_prompt, self.rope_offset]
        return [*of_layers, *of_slots]

    def drop_first(
        self, layer_idx: int, slots: Sequence[int] | np.ndarray, num: int | np.ndarray
    ) -> None:
        """Count the first rows of some slots of a layer, ``[B]``, as gone."""
        self.rows[layer_idx, slots] -= num
        prompt_rows = self.prompt_rows[layer_idx, slots] - num
        self.prompt_rows[layer_idx, slots] = np.maximum(prompt_rows, 0)

    def note_copy(self, num_bytes: int) -> None:
        """Note the size of a temporary copy."""
        self.transient_bytes = max(self.transient_bytes, num_bytes)
