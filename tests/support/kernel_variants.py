"""Launch kernels for prompts of several lengths; print how often each would be compiled, as JSON.

Nothing is compiled or run. A kernel is compiled for each form of its arguments: constants, types,
and of numbers and addresses what Triton finds out by itself, that they are 1 or multiples of 16.
"""

import json
import os
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from kvpolicy.attention.triton_backend.compact import compact
from kvpolicy.attention.triton_backend.prompts import attend
from kvpolicy.model.fused.triton_kernels import rotate
from kvpolicy.toolkit.triton_redundancy import key_redundancy

QUERY_HEADS, HEADS, DIM = 4, 2, 32
FORMS: dict[str, set[object]] = defaultdict(set)


def launched(kernel: JITFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
    """Note a launch in place of doing it."""
    del grid, warmup
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    form: list[object] = []
    for param in kernel.params:
        value = given.pop(param.name)
        if param.is_constexpr:
            form.append(value)
        elif isinstance(value, Tensor):
            form.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, float) or param.do_not_specialize:
            form.append(type(value))
        else:
            aligned = not param.do_not_specialize_on_alignment and value % 16 == 0
            form.append((value == 1, aligned))
    FORMS[kernel.fn.__name__].add((*form, *given.items()))


def bring_in(num_sequences: int, num_tokens: int, num_rows: int, num_kept: int) -> None:
    """What a chunk of prompts launches that are compacted afterwards."""
    queries = torch.zeros(num_sequences, num_tokens, QUERY_HEADS, DIM).transpose(1, 2)
    turns = torch.zeros(num_sequences, 1, num_tokens, DIM)
    rotate(queries, queries, turns, turns, None, None, 0.0)
    keys = torch.zeros(num_sequences, HEADS, num_rows, DIM)
    sizes = torch.tensor([[num_tokens] * num_sequences, [num_rows] * num_sequences])
    track = torch.zeros(keys.shape[:3])
    attend(queries, keys, keys, sizes, [track], ["attn_sums"], scaling=1.0)
    key_redundancy(keys, threshold=0.5)
    keep = torch.zeros(num_sequences, HEADS, num_kept, dtype=torch.int64)
    held = torch.full(keep.shape[:2], num_rows)
    slab = torch.zeros(8, HEADS, 64, DIM)
    compact(slab, keep, torch.arange(num_sequences), held, held)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "interpreted kernels are not compiled"
    JITFunction.run = launched
    for sizes in ((1, 48, 64, 16), (1, 33, 35, 15), (2, 17, 50, 1), (3, 32, 33, 31)):
        bring_in(*sizes)
    json.dump({name: len(forms) for name, forms in FORMS.items()}, sys.stdout)
