"""Kernels that a GPU launches for a chunk of a prompt are counted, of models of any size."""

from typing import Any

import attrs
import pytest
import torch
from bench_parts import needs_meta_forwards
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvpolicy.lab.bench.diagnostics.counting import WithoutNumbers, counting
from kvpolicy.lab.bench.diagnostics.prompt_kernels import PromptKernels, prompt_kernels_of
from kvpolicy.lab.bench.models import random_model, shape_named
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.sweep_file import Series

MODEL = {"products": 4, "norms": 2, "RoPE": 1, "gates": 1}


def counted(
    policy: str, name: str = "8b", *, num_layers: int = 36, budget: int = 512, **entries: Any
) -> PromptKernels:
    def model(num_layers: int, positions: int) -> PreTrainedModel:
        shape = attrs.evolve(shape_named(name), num_layers=num_layers)
        return random_model(shape, 0, max_positions=positions, dtype="bfloat16", device="meta")

    series = [Series(policy, {"stack": [policy], **entries})]
    budgets = [None if policy == "full" else budget]
    (cell,) = build_cells(series, num_layers=num_layers, budgets=budgets, buffer=64)
    return prompt_kernels_of(model, cell)


@needs_meta_forwards
@pytest.mark.parametrize(
    ("policy", "attention", "others"),
    [
        # Keys, values and positions are stored, and the result is turned.
        ("full", 1, 4),
        # Rows are stored in slabs and beside them, brought together, emptied, attended to, added
        # up, and added to both.
        ("h2o", 2, 6 + 2 + 1 + 2),
    ],
)
def test_a_layer_launches_what_it_computes(policy: str, attention: int, others: int) -> None:
    found = counted(policy)
    assert found.fused.of_layer == MODEL | {"attention": attention, "others": others}
    assert found.plain.of_layer["products"] == 7
    assert found.plain.of_layer["attention"] == attention
    assert found.plain.of_layer["others"] > 25 + others
    assert found.plain.once > found.fused.once > 15
    assert found.tokens <= 1024


@needs_meta_forwards
def test_layers_with_policies_of_their_own_count_as_many_as_they_are() -> None:
    groups = [{"where": "0:6", "stack": ["full"]}, {"where": "6:"}]
    mixed = counted("h2o", "tiny", num_layers=8, budget=128, layers=groups)
    full, evicting = (
        counted(policy, "tiny", num_layers=8, budget=128) for policy in ("full", "h2o")
    )
    for form in ("plain", "fused"):
        one, less, more = (getattr(found, form) for found in (mixed, full, evicting))
        assert one.of_layer == {
            kind: (3 * less.of_layer[kind] + more.of_layer[kind]) / 4 for kind in one.of_layer
        }
        assert one.once == more.once > less.once
    assert mixed.tokens == evicting.tokens == 64


@needs_meta_forwards
def test_layers_with_buffers_of_their_own_are_compacted_in_chunks_of_their_own() -> None:
    def streaming(*sizes: tuple[int, int]) -> PromptKernels:
        groups = [
            {"where": [number], "budget": budget, "buffer": buffer}
            for number, (budget, buffer) in enumerate(sizes)
        ]
        return counted("streaming", "tiny", num_layers=len(sizes), layers=groups)

    alone, rarely = streaming((64, 32)), streaming((64, 96))
    assert (alone.tokens, rarely.tokens) == (32, 96)
    third, apart = streaming((64, 32), (64, 96)), streaming((64, 32), (80, 32))
    # The second layer is compacted in every third chunk, or in chunks between.
    assert (third.tokens, apart.tokens) == (32, 16)
    assert apart.plain == alone.plain
    assert third.plain.of_layer == alone.plain.of_layer
    more, compacting = (
        found.plain.once - counted("full", "tiny").plain.once for found in (third, alone)
    )
    assert compacting < more < 1.5 * compacting


@needs_meta_forwards
def test_counts_do_not_depend_on_sizes() -> None:
    large, small = counted("snapkv", "8b"), counted("snapkv", "tiny")
    assert large == small


@needs_meta_forwards
def test_a_chunk_in_the_middle_of_a_prompt_waits_for_no_token() -> None:
    assert counted("full").fused.reads == {}
    assert set(counted("streaming").fused.reads) <= {"devices.py:read"}


def test_what_has_no_numbers_is_read_as_zeros() -> None:
    numbers = torch.ones(2, 3, device="meta")
    with WithoutNumbers(), counting() as found:
        assert not (numbers > 0).any()
        assert numbers.sum().item() == 0
        assert numbers.to("cpu", non_blocking=True).tolist() == [[0.0] * 3] * 2
        assert numbers.to(torch.float64).is_meta
    assert torch.ones(2).tolist() == [1.0, 1.0]
    assert found.reads == {"the model": 3}
    computed = {"aten::gt": 1, "aten::any": 1, "aten::sum": 1, "aten::_to_copy": 1}
    assert found.operators == computed | {"aten::zeros": 3}  # in place of copies to the host


def test_attention_without_numbers_is_one_operator() -> None:
    shape = (2, 4, 7, 8)
    given = [torch.zeros(shape, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    with WithoutNumbers(), counting() as found:
        output: Tensor = F.scaled_dot_product_attention(*given, is_causal=True)
    assert output.shape == shape
    assert found.operations == 1
