"""Models of benchmarks have the sizes that they name."""

import pytest
import torch
from bench_parts import ROW
from tiny import tiny_model

from kvpolicy.lab.bench.models import SHAPES, kv_row_bytes, random_model, weight_bytes


@pytest.mark.parametrize("name", ["tiny", "5m"])
def test_a_shape_counts_what_its_model_has(name: str) -> None:
    shape = SHAPES[name]
    model = random_model(shape, 0, max_positions=64)
    assert model.config.eos_token_id is None
    in_bf16 = random_model(shape, 0, max_positions=64, dtype="bfloat16")
    assert {one.dtype for one in in_bf16.parameters()} == {torch.bfloat16}
    assert weight_bytes(in_bf16) * 2 == weight_bytes(model)


def test_shapes_are_as_large_as_their_names_say() -> None:
    def num_parameters(name: str) -> int:
        return random_model(SHAPES[name], 0, max_positions=64, device="meta").num_parameters()

    assert num_parameters("100m") == pytest.approx(100e6, rel=0.01)
    assert num_parameters("30m") == pytest.approx(30e6, rel=0.1)
    assert num_parameters("135m") == 134_515_008, "SmolLM2-135M's"
    assert num_parameters("8b") == 8_030_261_248, "Llama-3.1-8B's"


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_embedding_does_not_count_as_read(tied: bool) -> None:
    vocab, hidden, inner, kv = 61, 32, 64, 16
    model = tiny_model(tie_word_embeddings=tied)
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert weight_bytes(model) == 4 * (2 * layer + hidden + vocab * hidden)


def test_weights_depend_on_the_seed_only() -> None:
    before = torch.get_rng_state()
    one, again, other = (random_model(SHAPES["tiny"], s, max_positions=64) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(one.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_row_has_keys_and_values_of_all_layers() -> None:
    assert kv_row_bytes(tiny_model()) == ROW
