"""SEAL changes the hidden states at paragraph ends inside the thinking part only."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import reference
import torch
from folders import save_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_reasoner.task import make_problems
from recorder import Recorder
from tiny import bpe_tokenizer, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, hookimpl, load_policy
from kvpolicy.errors import KVPolicyError, PlanError, SteeringError
from kvpolicy.hooks.stack import Stack
from kvpolicy.model.loading import load_model
from kvpolicy.state import RegisterFile
from kvpolicy.toolkit.steering_vectors import (
    Calibration,
    SteeringVector,
    load_steering_vector,
    save_steering_vectors,
)

SIZE = 6
WORDS = ["<think>", "</think>", "ĊĊ", ".ĊĊ", ").ĊĊ", "Ċ", "a", "Ġa"]
TOKENIZER = bpe_tokenizer()
IDS = [TOKENIZER.convert_tokens_to_ids(word) for word in WORDS]
TEXTS = {i: TOKENIZER.decode([i]) for i in IDS}

texts = st.lists(st.sampled_from(IDS), min_size=1, max_size=12)


def save_vectors(folder: Path, *layers: int, size: int = SIZE, scale: float = 1.0) -> str:
    rng = torch.Generator().manual_seed(len(layers))
    vectors = [
        SteeringVector(
            vector=scale * torch.randn(size, generator=rng),
            layer=layer,
            calibration=Calibration(model="some-model"),
        )
        for layer in layers
    ]
    save_steering_vectors(folder / "vectors.safetensors", vectors)
    return str(folder / "vectors.safetensors")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_vectors(tmp_path_factory.mktemp("vectors"), 1, 3)


@attrs.define(eq=False)
class Bench:
    """Calls the hooks of a policy as the engine would, for ``num_sequences`` sequences."""

    policy: Any
    num_sequences: int
    tokenizer: Any = TOKENIZER
    file: RegisterFile = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.file = RegisterFile([self.policy], self.num_sequences, torch.device("cpu"))

    def prompt(self, b: int, token_ids: list[int], chunk: int) -> None:
        for start in range(0, len(token_ids), chunk):
            self.observe(b, token_ids[start : start + chunk], start, len(token_ids))

    def observe(self, b: int, token_ids: list[int], start: int, prompt_len: int) -> None:
        self.policy.observe(
            token_ids=torch.tensor(token_ids),
            start=start,
            prompt_len=prompt_len,
            tokenizer=self.tokenizer,
            registers=self.file.of_slots(b, b + 1),
        )

    def steer(self, hidden_states: Tensor, token_ids: list[int]) -> Tensor:
        return self.policy.steer(
            hidden_states=hidden_states,
            token_ids=torch.tensor(token_ids),
            tokenizer=self.tokenizer,
            registers=self.file.of_slots(0, self.num_sequences),
        )


@given(
    pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    chunk=st.integers(1, 5),
    strength=st.sampled_from([0.0, 1.0, -0.5, 3.0]),
    delimiter=st.sampled_from(["\n\n", ".\n\n", "\n"]),
    think=st.sampled_from([("<think>", "</think>"), None]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_steering_equals_the_reference(
    vectors: str,
    pairs: list[tuple[list[int], list[int]]],
    chunk: int,
    strength: float,
    delimiter: str,
    think: tuple[str, str] | None,
    dtype: torch.dtype,
) -> None:
    """Sequences with different prompts in one batch; prompts in chunks of any size."""
    knobs = {"strength": strength, "delimiter": delimiter, "think": think}
    policy = load_policy("seal", vector=vectors, layer=1, **knobs)
    bench = Bench(policy, len(pairs))
    for b, (prompt, _) in enumerate(pairs):
        bench.prompt(b, prompt, chunk)
    num_steps = min(len(generated) for _, generated in pairs)
    expected = [
        reference.steered_tokens(
            [TEXTS[i] for i in prompt], [TEXTS[i] for i in generated], delimiter, think
        )
        for prompt, generated in pairs
    ]
    vector = load_steering_vector(vectors, 1).vector
    for step in range(num_steps):
        states = torch.ones(len(pairs), SIZE, dtype=dtype)
        change = bench.steer(states, [generated[step] for _, generated in pairs])
        assert change.dtype == dtype
        for b in range(len(pairs)):
            expected_change = (strength * vector).to(dtype) * expected[b][step]
            assert torch.equal(change[b], expected_change)
        for b, (prompt, generated) in enumerate(pairs):
            # observe() of generated tokens must not change the state that steer() has set.
            bench.observe(b, [generated[step]], len(prompt) + step, len(prompt))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"stack": ["full", {"policy": "seal", "layer": 3}]}], "layers 0 to 1 only"),
        (
            [
                {"where": [0], "stack": ["full", {"policy": "seal", "layer": 1}]},
                {"where": [1], "stack": ["full"]},
            ],
            "layer 0 only",
        ),
    ],
)
def test_plan_without_the_layer_of_the_vector_raises(
    vectors: str, layers: list[dict[str, Any]], message: str
) -> None:
    for group in layers:
        for policy in group["stack"][1:]:
            policy["vector"] = vectors
    with pytest.raises(PlanError, match=rf"'seal' steers layer \d, but .* {message}"):
        Plan.from_dict({"layers": layers}).resolve(2)


def test_only_the_layer_of_the_vector_is_steered(vectors: str) -> None:
    stack = Stack([("seal", load_policy("seal", vector=vectors, layer=1))])
    assert [stack.is_steered(layer) for layer in range(3)] == [False, True, False]


# In the engine


@attrs.define(eq=False)
class RecordsLayerInput:
    """Records the states before steering and the layer input of every decode step."""

    steers: tuple[int, ...]
    before: list[Tensor] = attrs.field(factory=list)
    entered: list[Tensor] = attrs.field(factory=list)
    token_ids: list[Tensor] = attrs.field(factory=list)

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor) -> None:
        self.before.append(hidden_states.clone())
        self.token_ids.append(token_ids.clone())

    def watch(self, _: nn.Module, arguments: tuple[Any, ...], __: object) -> None:
        if arguments[0].shape[1] == 1:
            self.entered.append(arguments[0][:, 0].clone())


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reasoner_is_steered_at_every_paragraph_of_its_thinking(dtype: str) -> None:
    model, tokenizer = load_model("reasoner", dtype=dtype)
    vector = load_steering_vector("reasoner")
    notes = RecordsLayerInput((vector.layer,))
    plan = Plan.uniform("full", "seal", notes, knobs={"seal": {"strength": 2.0}})
    problems = make_problems(2, seed=3, split="tune")
    engine = Engine(model, tokenizer, plan, slots=1)
    # Now, since a new engine has run a token of its own.
    handle = model.model.layers[vector.layer].register_forward_hook(notes.watch)
    results = engine.generate([p.prompt for p in problems], max_new_tokens=400).results()
    handle.remove()
    fed = [token for result in results for token in result.tokens[:-1]]
    assert [int(ids) for ids in notes.token_ids] == fed
    texts = [tokenizer.convert_ids_to_tokens(list(result.tokens[:-1])) for result in results]
    tags = ("<think>", "</think>")
    expected = [
        flag for text in texts for flag in reference.steered_tokens(["<think>"], text, "\n\n", tags)
    ]
    steered_by = (2.0 * vector.vector).to(model.dtype)
    assert any("</think>" in text for text in texts)
    assert sum(expected) > 10
    for flag, before, entered in zip(expected, notes.before, notes.entered, strict=True):
        assert torch.equal(entered[0], before[0] + steered_by if flag else before[0])


def generated(model: Any, tokenizer: Any, *stack: object, **options: Any) -> list[Any]:
    knobs = {"seal": options.pop("knobs")} if "knobs" in options else None
    plan = Plan.uniform(*stack, knobs=knobs, **options)
    prompts = [problem.prompt for problem in make_problems(4, seed=5, split="tune")]
    return Engine(model, tokenizer, plan, slots=3).generate(prompts, max_new_tokens=150).results()


@pytest.mark.nightly
def test_strength_zero_changes_nothing() -> None:
    model, tokenizer = load_model("reasoner")
    none = {"strength": 0}
    for plan in ({"stack": ("full",)}, {"stack": ("rkv",), "budget": 96, "buffer": 16}):
        stack, options = plan.pop("stack"), plan
        plain = generated(model, tokenizer, *stack, **options)
        steered = generated(model, tokenizer, *stack, "seal", knobs=none, **options)
        assert [r.tokens for r in steered] == [r.tokens for r in plain]
        steered_by = generated(model, tokenizer, *stack, "seal", knobs={"strength": 4}, **options)
        assert [r.tokens for r in steered_by] != [r.tokens for r in plain]


@pytest.mark.nightly
def test_seal_alone_is_the_full_cache_and_keeps_budgets() -> None:
    model, tokenizer = load_model("reasoner")
    alone = generated(model, tokenizer, "seal")
    assert [r.tokens for r in alone] == [
        r.tokens for r in generated(model, tokenizer, "full", "seal")
    ]
    assert all(r.peak_rows == r.prompt_len + len(r.tokens) - 1 for r in alone)
    recorder = Recorder()
    bounded = generated(model, tokenizer, "rkv", "seal", recorder, budget=64, buffer=16)
    assert all(result.peak_rows <= 64 + 16 for result in bounded)
    assert recorder.records
    assert not Stack([("seal", load_policy("seal"))]).bounded


@pytest.mark.nightly
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_steering_does_not_depend_on_other_sequences(slots: int) -> None:
    model, tokenizer = load_model("reasoner")
    plan = Plan.uniform("full", "seal", knobs={"seal": {"strength": 3.0}})
    prompts = [problem.prompt for problem in make_problems(3, seed=6, split="tune")]
    prompts[1] += "</think>"  # the thinking part has ended
    engine = Engine(model.double(), tokenizer, plan, slots=slots, chunk=11)
    batched = engine.generate(prompts, max_new_tokens=16).results()
    for prompt, result in zip(prompts, batched, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=16).results()
        assert result.tokens == alone.tokens


# Mistakes


def test_vector_of_another_model_raises(tmp_path: Path) -> None:
    model, tokenizer = load_model(str(save_tiny_model(tmp_path / "tiny")))
    plan = Plan.uniform("full", "seal", knobs={"seal": {"layer": 1}})
    with pytest.raises(SteeringError, match=r"128 .* 32.* reasoner"):
        Engine(model, tokenizer, plan).generate([" tea"], max_new_tokens=4).results()


def test_missing_tokenizer_raises(tmp_path: Path) -> None:
    plan = Plan.uniform(
        "full", "seal", knobs={"seal": {"vector": save_vectors(tmp_path, 1, size=32)}}
    )
    with pytest.raises(KVPolicyError, match="tokenizer"):
        Engine(tiny_model(), None, plan).generate([[1, 2, 3]], max_new_tokens=4).results()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"think": ("<t>", "</t>")}, "is '<t>'"),
        ({"delimiter": "a\n\n"}, "contains 'a\\n\\n'"),
    ],
)
def test_tokens_missing_in_the_tokenizer_are_named_in_the_error(
    vectors: str, knobs: dict, message: str
) -> None:
    bench = Bench(load_policy("seal", vector=vectors, layer=1, **knobs), 1)
    with pytest.raises(KVPolicyError, match=r"delimiter.* think") as caught:
        bench.prompt(0, IDS[:1], 1)
    assert message in str(caught.value)


def test_empty_think_list_means_no_tags() -> None:
    assert load_policy("seal", think=[]).think == load_policy("seal", think=None).think == ()
    assert load_policy("seal", think=["<t>", "</t>"]).think == ("<t>", "</t>")
