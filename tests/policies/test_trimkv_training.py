"""Training of TRIM-KV's gates: closed forms, the student, and runs that stop and go on."""

from pathlib import Path

import attrs
import pytest
import reference_trimkv as reference
import torch
from any_model import tiny_random_model
from families import FAMILIES, family_model
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.trimkv import checkpoint
from kvpolicy_plugins.trimkv.gates import Gates, new_gate
from kvpolicy_plugins.trimkv.retention import (
    capacity_loss,
    decay_bias,
    log_utility,
    soft_occupancy,
)
from kvpolicy_plugins.trimkv.student import Student
from kvpolicy_plugins.trimkv.training import Recipe, Trainer
from strategies import seeds
from tiny import tiny_model
from torch import Tensor

from kvpolicy.errors import KVPolicyError

RECIPE = Recipe(steps=6, batch=2, memory=3, lr=0.05, warmup=2, intermediate_size=8, seed=3)


def random_log_beta(*shape: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return -torch.rand(shape, generator=rng, dtype=torch.float64)


def texts(num: int = 5, seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 20, (num,), generator=rng).tolist()
    return [torch.randint(1, 60, (length,), generator=rng).tolist() for length in lengths]


def constant_gates(model: torch.nn.Module, bias: float, num_layers: int = 2) -> Gates:
    """Gates that retain as much of every token."""
    config = model.config.get_text_config()
    gate = new_gate(
        "rg",
        num_inputs=config.hidden_size,
        num_heads=config.num_key_value_heads,
        intermediate_size=4,
        bias=bias,
        generator=torch.Generator().manual_seed(0),
    )
    silent = gate.tensors | {"linear2.weight": torch.zeros(config.num_key_value_heads, 4)}
    return Gates(by_layer=dict.fromkeys(range(num_layers), attrs.evolve(gate, tensors=silent)))


@given(seeds, st.integers(1, 12))
def test_soft_occupancy_is_the_sum_of_the_loops(seed: int, num_tokens: int) -> None:
    log_beta = random_log_beta(2, num_tokens, seed=seed)
    for head, found in zip(log_beta.tolist(), soft_occupancy(log_beta).tolist(), strict=True):
        assert found == pytest.approx(reference.occupancy(head))


def test_gradient_of_blocks_is_the_closed_form() -> None:
    num_tokens = 300  # two blocks
    log_beta = random_log_beta(num_tokens, seed=1).mul(0.1).requires_grad_()
    t = 290
    (gradient,) = torch.autograd.grad(soft_occupancy(log_beta)[t], log_beta)
    assert gradient.tolist() == pytest.approx(
        reference.occupancy_gradient(log_beta.tolist(), t), abs=1e-12
    )


@given(seeds, st.sampled_from([0.5, 2.0, 5.0]), st.sampled_from(["active", "paper"]))
def test_capacity_loss_is_that_of_the_loops(seed: int, memory: float, norm: str) -> None:
    log_beta = random_log_beta(2, 2, 2, 9, seed=seed) * 0.2
    found = capacity_loss(log_beta, memory, norm=norm)
    heads = log_beta.flatten(0, 2).tolist()
    assert float(found) == pytest.approx(reference.capacity(heads, memory, norm))


def test_padding_does_not_count_and_a_model_may_share_its_capacity() -> None:
    log_beta = random_log_beta(1, 1, 2, 9, seed=2) * 0.2
    present = torch.arange(9)[None] < 6
    for norm in ("active", "paper"):
        padded = capacity_loss(log_beta, 2.0, present=present, norm=norm)
        assert float(padded) == pytest.approx(
            reference.capacity(log_beta[..., :6].flatten(0, 2).tolist(), 2.0, norm)
        )
    shares = torch.stack([torch.full((9,), -9.0), torch.zeros(9)]).double()[None, None]
    assert float(capacity_loss(shares, 5.5)) > 0  # the second head holds 9 rows
    assert float(capacity_loss(shares, 5.5, over="model")) == 0  # both hold 10 of 11


def test_capacity_loss_passes_gradcheck() -> None:
    log_beta = random_log_beta(1, 1, 2, 7, seed=5).mul(0.2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: capacity_loss(x, 1.5, norm="paper"), log_beta)


@given(seeds, st.integers(1, 30), st.integers(0, 5))
def test_utility_of_queries_to_come_is_the_sum_of_the_loops(
    seed: int, horizon: int, age: int
) -> None:
    log_beta = random_log_beta(4, seed=seed).float()
    log_beta[0] = 0.0
    found = log_utility(log_beta, torch.full((4,), age), horizon)
    sums = [
        sum(torch.tensor(one * (age + s)).exp().item() for s in range(horizon))
        for one in log_beta.tolist()
    ]
    assert found.exp().tolist() == pytest.approx(sums, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gpt_oss", "mistral"])
def test_without_gates_the_student_is_the_model(family: str) -> None:
    assert family in FAMILIES
    model = family_model(family)
    ids = torch.randint(1, 60, (2, 17), generator=torch.Generator().manual_seed(0))
    before = model.config._attn_implementation
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        with Student(model) as student:
            found = student.logits(student.teach(ids))
            kept, _ = student.learn(ids, constant_gates(model, 60.0))
            retained = student.logits(kept)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(retained, expected, atol=2e-4, rtol=1e-4)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert model(input_ids=ids, use_cache=False).logits.equal(expected)


def test_the_bias_multiplies_weights_by_the_decayed_retention() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, log_beta = torch.randn(6, 6, generator=rng), -torch.rand(6, generator=rng)
    visible = torch.ones(6, 6).tril() > 0
    biased = (logits + decay_bias(log_beta, 0, 6)).masked_fill(~visible, -torch.inf).softmax(1)
    t = torch.arange(6)
    decay = log_beta.exp() ** (t[:, None] - t).clamp(min=0)
    weighted = (logits.exp() * decay).where(visible, 0)
    torch.testing.assert_close(biased, weighted / weighted.sum(dim=1, keepdim=True))


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    model.requires_grad_(False)
    ids = torch.randint(1, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    gates = constant_gates(model, 2.0)
    bias = gates.by_layer[0].tensors["bias"].requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        with Student(model) as student:
            states, _ = student.learn(ids, gates)
            return states, torch.autograd.grad(states.square().sum(), bias)[0]

    whole = run()
    monkeypatch.setattr("kvpolicy_plugins.trimkv.student.BLOCK", 7)
    torch.testing.assert_close(run(), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["rg", "rg2", "rg3"])
def test_training_lowers_the_occupancy_and_leaves_the_model(form: str) -> None:
    model = tiny_model("llama")
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    trainer = Trainer(model, texts(), attrs.evolve(RECIPE, form=form, steps=40))
    records = list(trainer.steps())
    assert trainer.bias == pytest.approx(3.3, abs=0.3)  # ln(T / 0.5)
    assert records[0].kl < 0.02
    assert records[-1].occupancy < 0.6 * records[0].occupancy
    assert all(one.equal(weights[name]) for name, one in model.state_dict().items())


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    path, identity = tmp_path / "run.checkpoint.safetensors", {"model": "tiny"}
    whole = Trainer(tiny_model("llama"), texts(), RECIPE)
    list(whole.steps())
    first = Trainer(tiny_model("llama"), texts(), RECIPE)
    stepping = first.steps()
    records = [next(stepping) for _ in range(3)]
    checkpoint.save(path, first, checkpoint.Progress(records, 1.5), identity)
    next(stepping)  # lost
    second = Trainer(tiny_model("llama"), texts(), RECIPE)
    progress = checkpoint.restore(path, second, identity)
    assert (second.done, progress.elapsed_s, list(progress.records)) == (3, 1.5, records)
    list(second.steps())
    for name, tensor in whole.state().items():
        assert second.state()[name].equal(tensor), name
    with pytest.raises(KVPolicyError, match=r"model .*tiny.* other"):
        checkpoint.restore(path, second, {"model": "other"})


def test_gates_for_latents_are_refused() -> None:
    model = tiny_random_model("DeepseekV3ForCausalLM")
    with pytest.raises(KVPolicyError, match="latents"):
        Trainer(model, texts(), RECIPE)


def test_texts_of_one_token_are_no_texts() -> None:
    with pytest.raises(KVPolicyError, match="tokens"):
        Trainer(tiny_model("llama"), [[1]], RECIPE)
