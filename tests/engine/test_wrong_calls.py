"""Invalid input to the Python API raises the right class with a one-sentence message."""

import copy
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_tokenizer, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Request, Sampling, hookimpl, load_model, load_policy
from kvpolicy.errors import (
    KnobError,
    KVPolicyError,
    ModelError,
    OutputError,
    PlanError,
    PolicyLoadError,
    RequestError,
    SteeringError,
    UnknownPolicyError,
)
from kvpolicy.files import atomic_write
from kvpolicy.hooks.discovery import load_policy_file
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.toolkit.steering_vectors import load_steering_vector, save_steering_vectors


@attrs.define(eq=False)
class InlinePolicy:
    """A policy made in Python."""

    strength: int = 3

    @hookimpl
    def score(self, positions):
        return positions.float()


def endless() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["stack"] = [data]
    return data


class Wrapper(torch.nn.Module):
    """A module with the configuration of a model, and nothing else of it."""

    config = shared_model().config


@lru_cache
def engine(tokenizer: bool = True) -> Engine:
    plan = Plan.uniform("h2o", budget=8, buffer=4)
    return Engine(shared_model(), tiny_tokenizer() if tokenizer else None, plan, slots=2)


def plan(*stack: object, **options: Any) -> Callable[[], object]:
    return lambda: Plan.uniform(*stack, **options).resolve(2)


def generate(prompts: Any, **options: Any) -> Callable[[], object]:
    return lambda: engine().generate(prompts, **options)


Case = tuple[Callable[[], object], type[KVPolicyError], str]

CASES: dict[str, Case] = {
    # plans
    "a plan without a policy": (plan(budget=9), PlanError, "layers 'all'"),
    "an unknown policy": (plan("h20", budget=9), UnknownPolicyError, "did you mean h2o"),
    "an unknown knob": (
        plan("h2o", budget=9, knobs={"h2o": {"n_recnt": 3}}),
        KnobError,
        "n_recent",
    ),
    "a knob called name": (
        plan("h2o", budget=9, knobs={"h2o": {"name": 3}}),
        KnobError,
        "'name'",
    ),
    "knobs of a policy not in the stack": (
        plan("h2o", budget=9, knobs={"rkv": {}}),
        PlanError,
        "rkv",
    ),
    "knobs that are a number": (plan("h2o", budget=9, knobs=3), PlanError, "knobs"),
    "knobs of a policy that are a number": (
        plan("h2o", budget=9, knobs={"h2o": 3}),
        PlanError,
        "knobs",
    ),
    "a class for a policy": (
        plan(InlinePolicy, budget=9),
        PlanError,
        "InlinePolicy()",
    ),
    "a number for a policy": (
        plan(3, budget=9),
        PlanError,
        "stack[0]: 3",
    ),
    "nothing for a policy": (plan(None, budget=9), PlanError, "None"),
    "a list for a policy": (plan(["h2o"], budget=9), PlanError, "['h2o']"),
    "a table for a policy": (plan({"knob": 3}, budget=9), PlanError, "{'knob': 3}"),
    "an object without hooks": (plan(object(), budget=9), PolicyLoadError, "implements no hook"),
    "a text for a schedule": (
        plan("full", schedule="skipkv_batches"),
        PlanError,
        "schedule: 'skipkv_batches'",
    ),
    "a budget as text": (plan("h2o", budget="9"), PlanError, "budget: '9'"),
    "a budget of 0": (plan("h2o", budget=0), PlanError, "budget: 0"),
    "a budget that is true": (plan("h2o", budget=True), PlanError, "budget: True"),
    "a budget that is a float": (plan("h2o", budget=9.0), PlanError, "budget: 9.0"),
    "a budget above the maximum": (plan("h2o", budget=2**31), PlanError, "is out of range"),
    "a buffer as text": (plan("h2o", budget=9, buffer="x"), PlanError, "buffer: 'x'"),
    "a buffer below 1": (plan("h2o", budget=9, buffer=-1), PlanError, "buffer: -1"),
    "a length as text": (plan("h2o", budget=9, length="x"), PlanError, "length: 'x'"),
    "an unknown padding": (plan("full", padding="left"), PlanError, "left"),
    "a stack that is a text": (
        lambda: Plan(stack="h2o"),
        PlanError,
        "stack: 'h2o'",
    ),
    "a stack that is a number": (lambda: Plan(stack=3), PlanError, "stack: 3"),
    "layers that are numbers": (
        lambda: Plan(stack=("h2o",), budget=9, layers=[3]),
        PlanError,
        "layers[0]: 3",
    ),
    "layers that are a number": (lambda: Plan(layers=3), PlanError, "layers: 3"),
    "layers with an unknown key": (lambda: Plan(layers=[{"a": 3}]), PlanError, "'a'"),
    "a group of no layers": (lambda: LayerGroup([]), PlanError, "where: []"),
    "a group of a number": (lambda: LayerGroup(3), PlanError, "where: 3"),
    "a group of texts": (lambda: LayerGroup(["a"]), PlanError, "where: ['a']"),
    "a group with a text for a stack": (
        lambda: LayerGroup(stack="h2o"),
        PlanError,
        "h2o",
    ),
    "a plan that is a list": (
        lambda: Plan.from_dict(["h2o"]),
        PlanError,
        "['h2o']",
    ),
    "layers that are numbers, as data": (
        lambda: Plan.from_dict({"stack": ["full"], "layers": [3]}),
        PlanError,
        "layers[0]: 3",
    ),
    "a key that is a number": (
        lambda: Plan.from_dict({3: 4}),
        PlanError,
        "3",
    ),
    "overrides that are a text": (
        lambda: Plan.from_dict({"stack": ["full"]}, "budget=9"),
        PlanError,
        "'budget=9'",
    ),
    "overrides that are numbers": (
        lambda: Plan.from_dict({"stack": ["full"]}, [3]),
        PlanError,
        "3",
    ),
    "a plan resolved for 0 layers": (
        lambda: Plan.uniform("full").resolve(0),
        PlanError,
        "0 layers",
    ),
    "a plan resolved for a text": (
        lambda: Plan.uniform("full").resolve("2"),
        PlanError,
        "'2' layers",
    ),
    "a file with a NUL in its name": (
        lambda: Plan.load("a\0.toml"),
        PlanError,
        "null byte",
    ),
    "a name with a NUL": (lambda: Plan.load("a\0"), PlanError, "'a"),
    "a plan for a model": (
        lambda: Plan.uniform("full").resolve(shared_model()),
        PlanError,
        "LlamaForCausalLM",
    ),
    "overrides that are nothing": (
        lambda: Plan.from_dict({"stack": ["full"]}, None),
        PlanError,
        "None",
    ),
    "a plan that holds itself": (
        lambda: Plan.from_dict(endless()),
        PlanError,
        "itself",
    ),
    "a file that is nothing": (
        lambda: Plan.load(None),
        PlanError,
        "None",
    ),
    "a file that is a plan": (
        lambda: Plan.load(Plan.uniform("full")),
        PlanError,
        "Plan(",
    ),
    "a knob that is a number": (
        plan("h2o", budget=9, knobs={"h2o": {3: 3}}),
        PlanError,
        "{3: 3}",
    ),
    "a path for a policy": (
        plan(Path("policy.py"), budget=9),
        PolicyLoadError,
        "posix_path",
    ),
    "a tensor for a policy": (plan(torch.ones(2), budget=9), PolicyLoadError, "implements no hook"),
    "one object twice": (
        plan(*[InlinePolicy()] * 2, budget=9),
        PolicyLoadError,
        "twice",
    ),
    # policies
    "a file that is a folder": (lambda: load_policy_file("/"), PolicyLoadError, "'/'"),
    "a policy named by nothing": (
        lambda: load_policy(None),
        UnknownPolicyError,
        "None",
    ),
    "a policy named by a list": (lambda: load_policy([]), UnknownPolicyError, "[]"),
    "a name with a line break": (
        lambda: load_policy("h2o\n"),
        UnknownPolicyError,
        "'h2o\\n'",
    ),
    "a plugin file that is a number": (
        lambda: load_policy_file(3),
        PolicyLoadError,
        "3",
    ),
    "an empty policy name": (lambda: load_policy(""), UnknownPolicyError, "''"),
    "a very long name": (
        lambda: load_policy("h2o" * 10_000),
        UnknownPolicyError,
        "no policy is named",
    ),
    "a knob of another kind": (
        lambda: load_policy("streaming", n_sink="x"),
        KnobError,
        "'streaming'",
    ),
    # the engine
    "no plan": (lambda: Engine(shared_model()), KVPolicyError, "plan"),
    "a plan that is a name": (
        lambda: Engine(shared_model(), None, "h2o"),
        KVPolicyError,
        "'h2o'",
    ),
    "a model that is a name": (
        lambda: Engine("reasoner", None, Plan.uniform("full")),
        ModelError,
        "'reasoner'",
    ),
    "no slots": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), slots=0),
        KVPolicyError,
        "slots=0",
    ),
    "slots as text": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), slots="2"),
        KVPolicyError,
        "slots='2'",
    ),
    "slots as a float": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), slots=2.0),
        KVPolicyError,
        "slots=2.0",
    ),
    "no chunk": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), chunk=0),
        KVPolicyError,
        "chunk=0",
    ),
    "no tokens in a forward": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), max_tokens_per_forward=0),
        KVPolicyError,
        "max_tokens_per_forward=0",
    ),
    "one prompt": (generate("hello"), KVPolicyError, "'hello'"),
    "no list of prompts": (generate(3), KVPolicyError, "prompts"),
    "prompts by name": (generate({"a": 1}), KVPolicyError, "{'a': 1}"),
    "what a tokenizer returns": (
        lambda: engine().generate(tiny_tokenizer()(["ab", "cd"])),
        KVPolicyError,
        "prompts",
    ),
    "prompts in bytes": (generate(b"ab"), KVPolicyError, "b'ab'"),
    "too few samplings": (
        generate(["a", "b"], sampling=[Sampling()]),
        KVPolicyError,
        "sampling",
    ),
    "a sampling that is a number": (
        generate(["a"], sampling=0.7),
        KVPolicyError,
        "Sampling(temperature=0.7)",
    ),
    "samplings that are numbers": (
        generate(["a"], sampling=[0.7]),
        KVPolicyError,
        "Sampling(temperature=0.7)",
    ),
    "no new tokens": (
        generate(["a"], max_new_tokens=0),
        KVPolicyError,
        "max_new_tokens=0",
    ),
    "fractional max_new_tokens": (
        generate(["a"], max_new_tokens=1.5),
        KVPolicyError,
        "max_new_tokens=1.5",
    ),
    "max_new_tokens that is true": (
        generate(["a"], max_new_tokens=True),
        KVPolicyError,
        "max_new_tokens=True",
    ),
    "one request": (generate(Request([1, 2])), KVPolicyError, "list"),
    "a stop id that is nothing": (generate(["a"], stop_ids=[None]), KVPolicyError, "stop_ids"),
    "an empty stop string": (generate(["a"], stop=""), KVPolicyError, "stop"),
    "a stop string that is a number": (
        generate(["a"], stop=[3]),
        KVPolicyError,
        "stop",
    ),
    "stop strings that are one number": (
        generate(["a"], stop=3),
        KVPolicyError,
        "stop",
    ),
    "stop ids as text": (
        generate(["a"], stop_ids=["a"]),
        KVPolicyError,
        "stop_ids",
    ),
    "cancelling an unknown request": (
        lambda: engine().generate(["a"]).cancel(7),
        KVPolicyError,
        "7",
    ),
    "a temperature below 0": (
        lambda: Sampling(-1),
        KVPolicyError,
        "temperature=-1",
    ),
    "a temperature of NaN": (lambda: Sampling(float("nan")), KVPolicyError, "temperature=nan"),
    "an infinite temperature": (
        lambda: Sampling(float("inf")),
        KVPolicyError,
        "temperature=inf",
    ),
    "a temperature beyond floats": (
        lambda: Sampling(10**400),
        KVPolicyError,
        "temperature",
    ),
    "a temperature as text": (lambda: Sampling("hot"), KVPolicyError, "temperature='hot'"),
    "a fractional top_k": (
        lambda: Sampling(top_k=0.5),
        KVPolicyError,
        "top_k=0.5",
    ),
    "a top_p above 1": (
        lambda: Sampling(top_p=2),
        KVPolicyError,
        "top_p=2",
    ),
    "a seed below 0": (
        lambda: Sampling(seed=-1),
        KVPolicyError,
        "seed=-1",
    ),
    "a seed above the maximum": (lambda: Sampling(seed=2**64), KVPolicyError, "from 0 to"),
    # models, vectors, files
    "an unknown model": (
        lambda: load_model("/nowhere/at/all"),
        ModelError,
        "/nowhere/at/all",
    ),
    "a wrapper with a configuration": (
        lambda: Engine(Wrapper(), None, Plan.uniform("full")),
        ModelError,
        "Wrapper",
    ),
    "a vector named by nothing": (
        lambda: load_steering_vector(None),
        SteeringError,
        "None",
    ),
    "vectors that are numbers": (
        lambda: save_steering_vectors("v.safetensors", [3]),
        SteeringError,
        "3",
    ),
    "an unknown dtype": (lambda: load_model("x", dtype="int3"), ModelError, "'int3'"),
    "a missing steering vector": (
        lambda: load_steering_vector("nowhere.safetensors"),
        SteeringError,
        "nowhere.safetensors",
    ),
    "a file in a missing folder": (
        lambda: atomic_write(Path("/nowhere/at/all.json"), "{}"),
        OutputError,
        "/nowhere/at/all.json",
    ),
}


def test_wrong_calls_raise_a_line_that_names_what_is_wrong() -> None:
    wrong = {}
    for name, (call, kind, named) in CASES.items():
        with pytest.raises(KVPolicyError) as caught:
            call()
        message = str(caught.value)
        if type(caught.value) is not kind or named not in message or "\n" in message:
            wrong[name] = caught.value
    assert not wrong


PROMPTS: dict[str, tuple[Any, str]] = {
    "an empty text": ("", "empty"),
    "no tokens": ([], "empty"),
    "a long text": ("ab " * 70_000, "512"),
    "a list of megabytes": ([3] * 1_000_000, "1000000"),
    "half a surrogate pair": (
        "a \ud83d b",
        "\\ud83d at character 2",
    ),
    "bytes": (b"hello", "b'hello'"),
    "a number": (3, "3"),
    "nothing": (None, "None"),
    "an id beyond the vocabulary": ([1, 61], "61"),
    "an id below 0": ([1, -1], "-1"),
    "a fractional id": ([1, 2.5], "2.5"),
    "a fraction in a tensor": (torch.tensor([1.5]), "1.5"),
    "ids as text": (["1"], "'1'"),
    "nested ids": ([[1, 2]], "one row"),
    "a tensor of no dimension": (torch.tensor(3), "TypeError"),
    "a tensor without values": (
        torch.ones(3, dtype=torch.int64, device="meta"),
        "RuntimeError",
    ),
    "a generator that fails": ((1 // one for one in [0]), "ZeroDivisionError"),
    "a batch of tensors": (
        torch.ones(2, 3, dtype=torch.int64),
        "prompt",
    ),
}


def test_wrong_prompts_become_error_results_and_others_finish() -> None:
    *results, valid = (
        engine()
        .generate([*(one for one, _ in PROMPTS.values()), [1, 2, 3]], max_new_tokens=3)
        .results()
    )
    wrong = {}
    for (name, (_, named)), result in zip(PROMPTS.items(), results, strict=True):
        is_error = (result.finish_reason, result.tokens) == ("error", ())
        if not is_error or named not in str(result.error) or len(str(result.error)) > 200:
            wrong[name] = result.error
    assert not wrong
    assert len(valid.tokens) == 3


def test_text_without_a_tokenizer_gives_an_error_result() -> None:
    (result,) = engine(tokenizer=False).generate(["a"]).results()
    assert "tokenizer" in str(result.error)
    (result,) = engine(tokenizer=False).generate([[1]], stop="x").results()
    assert "stop" in str(result.error)


@pytest.mark.parametrize("stop", [(), "x"])
def test_tokenizer_that_cannot_decode_gives_an_error_result(stop: Any) -> None:
    def encode(text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}

    encoder = Engine(shared_model(), encode, Plan.uniform("full"))
    (result,) = encoder.generate(["a"], max_new_tokens=3, stop=stop).results()
    assert result.finish_reason == "error"
    assert "AttributeError" in str(result.error)
    with pytest.raises(RequestError, match="decode"):
        list(encoder.stream("a", max_new_tokens=3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_an_error_result(temperature: float, value: float) -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.data[7] = value
    broken = Engine(model, None, Plan.uniform("full"), slots=2)
    options: dict[str, Any] = {"max_new_tokens": 4, "sampling": Sampling(temperature)}
    wrong, valid = broken.generate([[1, 7], [1, 2, 3]], **options).results()
    assert (wrong.finish_reason, wrong.tokens) == ("error", ())
    assert "NaN or infinity" in str(wrong.error)
    (alone,) = Engine(shared_model(), None, Plan.uniform("full")).generate([[1, 2, 3]], **options)
    assert 7 in alone.tokens or valid.tokens == alone.tokens


def test_failing_tokenizer_gives_an_error_result() -> None:
    class Broken:
        def __call__(self, text: str) -> dict[str, list[int]]:
            raise RuntimeError("no\nvocabulary")

    broken = Engine(shared_model(), Broken(), Plan.uniform("full"))
    (result,) = broken.generate(["a"]).results()
    assert "RuntimeError: no vocabulary" in str(result.error), "in one line"


anything = st.recursive(
    st.text(st.characters(), max_size=40)
    | st.binary(max_size=9)
    | st.none()
    | st.floats()
    | st.integers(-5, 70)
    | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(), inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(anything | st.lists(st.integers(-2, 63), max_size=30), max_size=4))
def test_any_prompt_gives_a_result(prompts: list[Any]) -> None:
    results = bytes_engine().generate(prompts, max_new_tokens=2).results()
    assert [result.id for result in results] == list(range(len(prompts)))
    for result in results:
        assert (result.error is None) == (result.finish_reason != "error")
        assert len(result.tokens) == (0 if result.error else 2)


@given(
    st.lists(anything, min_size=1, max_size=2) | anything,
    st.dictionaries(
        st.sampled_from(["max_new_tokens", "sampling", "stop", "stop_ids"]), anything, max_size=2
    ),
)
def test_any_request_gives_results_or_a_kvpolicy_error(
    prompts: Any, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 2} | options
    try:
        run = bytes_engine().generate(prompts, **options)
    except KVPolicyError:
        return
    assert len(run.results()) == len(run.requests)


@lru_cache
def bytes_engine() -> Engine:
    model = tiny_model("qwen2", vocab=256)
    return Engine(model, byte_tokenizer(), Plan.uniform("streaming", budget=6, buffer=2), slots=2)


@given(st.sampled_from(["h2o", "rkv", "protect"]), st.dictionaries(st.text(max_size=9), anything))
def test_any_knob_gives_a_plan_or_a_kvpolicy_error(policy: str, knobs: dict[str, Any]) -> None:
    spec = PolicySpec(policy, knobs)
    try:
        Plan(stack=(spec,), budget=64).resolve(2).digest()
    except KVPolicyError as error:
        message = str(error)
    else:
        message = policy
    assert policy in message


def test_stream_of_a_failing_prompt_ends_with_an_error_result() -> None:
    stream = engine().stream("")
    assert list(stream) == []
    assert stream.result is not None
    assert "empty" in str(stream.result.error)
    assert isinstance(RequestError(stream.result.error), KVPolicyError)
    assert engine().generate([Request([1], 2)]).results()[0].finish_reason == "length"


def missing(policy: object, name: str) -> Any:
    raise KeyError(name)


@pytest.mark.parametrize("made_up", [lambda policy, _: policy, lambda *_: 3, missing])
def test_what_a_policy_makes_up_when_asked_is_no_declaration(made_up: Any) -> None:
    engines = []
    for cls in (InlinePolicy, type("MakesUp", (InlinePolicy,), {"__getattr__": made_up})):
        plan = Plan.uniform(cls(), budget=8, buffer=4)
        engines.append(Engine(shared_model(), plan=plan))
    request = Request([1] * 20, 10, stop_ids=(), snapshot=True)
    plain, odd = (engine.generate([request]).results()[0] for engine in engines)
    assert odd.error is None
    assert odd.tokens == plain.tokens


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_cannot_be_copied(copy_of: Callable[[Engine], object]) -> None:
    with pytest.raises(KVPolicyError, match="another"):
        copy_of(Engine(shared_model(), plan=Plan.uniform("full")))
