"""Invalid input to the Python API raises the right class with a one-sentence message."""

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
from kvpolicy.hooks.discovery import register_file
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
    "a plan without a policy": (plan(budget=9), PlanError, "names no policy for layers 'all'"),
    "an unknown policy": (plan("h20", budget=9), UnknownPolicyError, "did you mean h2o"),
    "an unknown knob": (
        plan("h2o", budget=9, knobs={"h2o": {"n_recnt": 3}}),
        KnobError,
        "no knob 'n_recnt'; did you mean n_recent",
    ),
    "a knob called name": (
        plan("h2o", budget=9, knobs={"h2o": {"name": 3}}),
        KnobError,
        "no knob 'name'",
    ),
    "knobs of a policy not in the stack": (
        plan("h2o", budget=9, knobs={"rkv": {}}),
        PlanError,
        "not in the stack",
    ),
    "knobs that are a number": (plan("h2o", budget=9, knobs=3), PlanError, "knobs were given as 3"),
    "knobs of a policy that are a number": (
        plan("h2o", budget=9, knobs={"h2o": 3}),
        PlanError,
        'write {"POLICY": {"KNOB": VALUE}}',
    ),
    "a class for a policy": (
        plan(InlinePolicy, budget=9),
        PlanError,
        "policy InlinePolicy was given as a class; give an object, InlinePolicy()",
    ),
    "a number for a policy": (
        plan(3, budget=9),
        PlanError,
        "in stack[0]: 3 is not a policy; write",
    ),
    "nothing for a policy": (plan(None, budget=9), PlanError, "None is not a policy"),
    "a list for a policy": (plan(["h2o"], budget=9), PlanError, "['h2o'] is not a policy"),
    "a table for a policy": (plan({"knob": 3}, budget=9), PlanError, "{'knob': 3} is not a policy"),
    "an object without hooks": (plan(object(), budget=9), PolicyLoadError, "implements no hook"),
    "a text for a schedule": (
        plan("full", schedule="skipkv_batches"),
        PlanError,
        "in schedule: 'skipkv_batches' is not a list of policies",
    ),
    "a budget as text": (plan("h2o", budget="9"), PlanError, "in budget: '9' is not a count or"),
    "a budget of 0": (plan("h2o", budget=0), PlanError, "in budget: 0 is out of range"),
    "a budget that is true": (plan("h2o", budget=True), PlanError, "True is not a count"),
    "a budget that is a float": (plan("h2o", budget=9.0), PlanError, "9.0 is not a count"),
    "a budget above the maximum": (plan("h2o", budget=2**31), PlanError, "is out of range"),
    "a buffer as text": (plan("h2o", budget=9, buffer="x"), PlanError, "in buffer: 'x' is not"),
    "a buffer below 1": (plan("h2o", budget=9, buffer=-1), PlanError, "in buffer: -1 is out of"),
    "a length as text": (plan("h2o", budget=9, length="x"), PlanError, "in length: 'x' is not"),
    "an unknown padding": (plan("full", padding="left"), PlanError, "'left' is not a padding"),
    "a stack that is a text": (
        lambda: Plan(stack="h2o"),
        PlanError,
        "in stack: 'h2o' is not a list",
    ),
    "a stack that is a number": (lambda: Plan(stack=3), PlanError, "3 is not a list of policies"),
    "layers that are numbers": (
        lambda: Plan(stack=("h2o",), budget=9, layers=[3]),
        PlanError,
        "in layers[0]: 3 is not a group of layers",
    ),
    "layers that are a number": (lambda: Plan(layers=3), PlanError, "in layers: 3 is not a list"),
    "layers with an unknown key": (lambda: Plan(layers=[{"a": 3}]), PlanError, "unknown key 'a'"),
    "a group of no layers": (lambda: LayerGroup([]), PlanError, "in where: [] is not a set"),
    "a group of a number": (lambda: LayerGroup(3), PlanError, "in where: 3 is not a set"),
    "a group of texts": (lambda: LayerGroup(["a"]), PlanError, "in where: ['a'] is not"),
    "a group with a text for a stack": (
        lambda: LayerGroup(stack="h2o"),
        PlanError,
        "'h2o' is not a list of policies",
    ),
    "a plan that is a list": (
        lambda: Plan.from_dict(["h2o"]),
        PlanError,
        "the plan was given as ['h2o']; give a table of its keys",
    ),
    "layers that are numbers, as data": (
        lambda: Plan.from_dict({"stack": ["full"], "layers": [3]}),
        PlanError,
        "in layers[0]: 3 is not a group of layers; write [[layers]]",
    ),
    "a key that is a number": (
        lambda: Plan.from_dict({3: 4}),
        PlanError,
        "a key 3; keys are texts",
    ),
    "overrides that are a text": (
        lambda: Plan.from_dict({"stack": ["full"]}, "budget=9"),
        PlanError,
        "were given as one text, 'budget=9'; give a list",
    ),
    "overrides that are numbers": (
        lambda: Plan.from_dict({"stack": ["full"]}, [3]),
        PlanError,
        "3 is not an override; write a text such as 'budget=96'",
    ),
    "a plan resolved for 0 layers": (
        lambda: Plan.uniform("full").resolve(0),
        PlanError,
        "cannot be resolved for 0 layers; give at least 1",
    ),
    "a plan resolved for a text": (
        lambda: Plan.uniform("full").resolve("2"),
        PlanError,
        "cannot be resolved for '2' layers",
    ),
    "a file with a NUL in its name": (
        lambda: Plan.load("a\0.toml"),
        PlanError,
        "cannot be read: embedded null byte",
    ),
    "a name with a NUL": (lambda: Plan.load("a\0"), PlanError, "no plan is named"),
    "a plan for a model": (
        lambda: Plan.uniform("full").resolve(shared_model()),
        PlanError,
        "cannot be resolved for LlamaForCausalLM(",
    ),
    "overrides that are nothing": (
        lambda: Plan.from_dict({"stack": ["full"]}, None),
        PlanError,
        "overrides of the plan were given as None; give a list",
    ),
    "a plan that holds itself": (
        lambda: Plan.from_dict(endless()),
        PlanError,
        "nested too deeply, or a list or a table in it holds itself",
    ),
    "a file that is nothing": (
        lambda: Plan.load(None),
        PlanError,
        "a plan was given as None; give its path as a text",
    ),
    "a file that is a plan": (
        lambda: Plan.load(Plan.uniform("full")),
        PlanError,
        "a plan was given as Plan(",
    ),
    "a knob that is a number": (
        plan("h2o", budget=9, knobs={"h2o": {3: 3}}),
        PlanError,
        'knobs of a policy were given as {3: 3}; write {"KNOB": VALUE}',
    ),
    "a path for a policy": (
        plan(Path("policy.py"), budget=9),
        PolicyLoadError,
        "'posix_path' implements no hook",
    ),
    "a tensor for a policy": (plan(torch.ones(2), budget=9), PolicyLoadError, "implements no hook"),
    "one object twice": (
        plan(*[InlinePolicy()] * 2, budget=9),
        PolicyLoadError,
        "is in the stack twice, as the same object; make an object for each",
    ),
    # policies
    "a file that is a folder": (lambda: register_file("/"), PolicyLoadError, "is no file"),
    "a policy named by nothing": (
        lambda: load_policy(None),
        UnknownPolicyError,
        "no policy is named None; give a text",
    ),
    "a policy named by a list": (lambda: load_policy([]), UnknownPolicyError, "is named []"),
    "a name with a line break": (
        lambda: load_policy("h2o\n"),
        UnknownPolicyError,
        "no policy is named 'h2o\\n'; did you mean h2o",
    ),
    "a plugin file that is a number": (
        lambda: register_file(3),
        PolicyLoadError,
        "a plugin file was given as 3; give its path as a text",
    ),
    "an empty policy name": (lambda: load_policy(""), UnknownPolicyError, "no policy is named ''"),
    "a very long name": (
        lambda: load_policy("h2o" * 10_000),
        UnknownPolicyError,
        "no policy is named",
    ),
    "a knob of another kind": (
        lambda: load_policy("streaming", n_sink="x"),
        KnobError,
        "policy 'streaming' refuses its knobs",
    ),
    # the engine
    "no plan": (lambda: Engine(shared_model()), KVPolicyError, "given no plan; write Plan.load("),
    "a plan that is a name": (
        lambda: Engine(shared_model(), None, "h2o"),
        KVPolicyError,
        "the engine was given 'h2o' for a plan; write Plan.load(FILE) or Plan.uniform(",
    ),
    "a model that is a name": (
        lambda: Engine("reasoner", None, Plan.uniform("full")),
        ModelError,
        "'reasoner'",
    ),
    "no slots": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), slots=0),
        KVPolicyError,
        "slots=0; expected an integer of at least 1",
    ),
    "slots as text": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), slots="2"),
        KVPolicyError,
        "slots='2'; expected an integer of at least 1",
    ),
    "no chunk": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), chunk=0),
        KVPolicyError,
        "chunk=0; expected an integer of at least 1",
    ),
    "no tokens in a forward": (
        lambda: Engine(shared_model(), None, Plan.uniform("full"), max_tokens_per_forward=0),
        KVPolicyError,
        "max_tokens_per_forward=0; expected an integer of at least 1",
    ),
    "one prompt": (generate("hello"), KVPolicyError, "one prompt, 'hello'; give a list"),
    "no list of prompts": (generate(3), KVPolicyError, "prompts were given as 3; give a list of"),
    "prompts by name": (generate({"a": 1}), KVPolicyError, "given as {'a': 1}; give a list"),
    "what a tokenizer returns": (
        lambda: engine().generate(tiny_tokenizer()(["ab", "cd"])),
        KVPolicyError,
        "give a list of prompts",
    ),
    "prompts in bytes": (generate(b"ab"), KVPolicyError, "given as b'ab'; give a list of prompts"),
    "too few samplings": (
        generate(["a", "b"], sampling=[Sampling()]),
        KVPolicyError,
        "1 samplings were given for 2 prompts; give one for each",
    ),
    "a sampling that is a number": (
        generate(["a"], sampling=0.7),
        KVPolicyError,
        "sampling was given as 0.7; write Sampling(temperature=0.7)",
    ),
    "samplings that are numbers": (
        generate(["a"], sampling=[0.7]),
        KVPolicyError,
        "sampling was given as 0.7; write Sampling(temperature=0.7)",
    ),
    "no new tokens": (
        generate(["a"], max_new_tokens=0),
        KVPolicyError,
        "=0; expected an integer",
    ),
    "fractional max_new_tokens": (
        generate(["a"], max_new_tokens=1.5),
        KVPolicyError,
        "=1.5; expected an integer",
    ),
    "an empty stop string": (generate(["a"], stop=""), KVPolicyError, "stop strings were given"),
    "a stop string that is a number": (
        generate(["a"], stop=[3]),
        KVPolicyError,
        "expected non-empty texts",
    ),
    "stop strings that are one number": (
        generate(["a"], stop=3),
        KVPolicyError,
        "stop strings were",
    ),
    "stop ids as text": (
        generate(["a"], stop_ids=["a"]),
        KVPolicyError,
        "expected integer token ids",
    ),
    "cancelling an unknown request": (
        lambda: engine().generate(["a"]).cancel(7),
        KVPolicyError,
        "there is no request 7 to cancel",
    ),
    "a temperature below 0": (
        lambda: Sampling(-1),
        KVPolicyError,
        "temperature=-1; expected a number",
    ),
    "a temperature of NaN": (lambda: Sampling(float("nan")), KVPolicyError, "temperature=nan"),
    "an infinite temperature": (
        lambda: Sampling(float("inf")),
        KVPolicyError,
        "temperature=inf; expected a number",
    ),
    "a temperature beyond floats": (
        lambda: Sampling(10**400),
        KVPolicyError,
        "expected a number of at least 0",
    ),
    "a temperature as text": (lambda: Sampling("hot"), KVPolicyError, "temperature='hot'"),
    "a fractional top_k": (
        lambda: Sampling(top_k=0.5),
        KVPolicyError,
        "top_k=0.5; expected an integer",
    ),
    "a top_p above 1": (
        lambda: Sampling(top_p=2),
        KVPolicyError,
        "top_p=2; expected a probability",
    ),
    "a seed below 0": (
        lambda: Sampling(seed=-1),
        KVPolicyError,
        "seed=-1; expected an integer from 0",
    ),
    "a seed above the maximum": (lambda: Sampling(seed=2**64), KVPolicyError, "from 0 to"),
    # models, vectors, files
    "an unknown model": (
        lambda: load_model("/nowhere/at/all"),
        ModelError,
        "model '/nowhere/at/all' is no folder",
    ),
    "a wrapper with a configuration": (
        lambda: Engine(Wrapper(), None, Plan.uniform("full")),
        ModelError,
        "model Wrapper cannot be run: it has no head",
    ),
    "a vector named by nothing": (
        lambda: load_steering_vector(None),
        SteeringError,
        "a steering vector was given as None",
    ),
    "vectors that are numbers": (
        lambda: save_steering_vectors("v.safetensors", [3]),
        SteeringError,
        "3 is not a steering vector",
    ),
    "an unknown dtype": (lambda: load_model("x", dtype="int3"), ModelError, "dtype 'int3' is"),
    "a missing steering vector": (
        lambda: load_steering_vector("nowhere.safetensors"),
        SteeringError,
        "nowhere.safetensors' cannot be read",
    ),
    "a file in a missing folder": (
        lambda: atomic_write(Path("/nowhere/at/all.json"), "{}"),
        OutputError,
        "/nowhere/at/all.json cannot be written: No such file or directory",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), CASES.values(), ids=CASES)
def test_wrong_call_raises_a_one_sentence_error(
    call: Callable[[], object], kind: type[KVPolicyError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


PROMPTS: dict[str, tuple[Any, str]] = {
    "an empty text": ("", "the prompt is empty; at least one token"),
    "no tokens": ([], "the prompt is empty; at least one token"),
    "a long text": ("ab " * 70_000, "tokens; the model has positions for 512"),
    "a list of megabytes": ([3] * 1_000_000, "1000000 tokens; the model has positions for"),
    "half a surrogate pair": (
        "a \ud83d b",
        "the prompt holds \\ud83d at character 2, which is not valid text",
    ),
    "bytes": (b"hello", "the prompt is b'hello'; expected text or a list of token ids"),
    "a number": (3, "the prompt is 3; expected text or a list"),
    "nothing": (None, "the prompt is None; expected text or a list"),
    "an id beyond the vocabulary": ([1, 61], "token id 61; expected 0 to 60"),
    "an id below 0": ([1, -1], "token id -1; expected 0 to 60"),
    "a fractional id": ([1, 2.5], "the prompt holds 2.5; expected text or integer token ids"),
    "ids as text": (["1"], "the prompt holds '1'; expected text or integer token ids"),
    "nested ids": ([[1, 2]], "the prompt holds [1, 2]; expected text or integer token ids"),
    "a tensor of no dimension": (torch.tensor(3), "the prompt cannot be read: TypeError"),
    "a tensor without values": (
        torch.ones(3, dtype=torch.int64, device="meta"),
        "the prompt cannot be read: RuntimeError",
    ),
    "a generator that fails": ((1 // one for one in [0]), "cannot be read: ZeroDivisionError"),
    "a batch of tensors": (
        torch.ones(2, 3, dtype=torch.int64),
        "expected text or integer token ids",
    ),
}


@pytest.mark.parametrize(("prompt", "message"), PROMPTS.values(), ids=PROMPTS)
def test_wrong_prompt_becomes_an_error_result_and_others_finish(prompt: Any, message: str) -> None:
    wrong, valid = engine().generate([prompt, [1, 2, 3]], max_new_tokens=3).results()
    assert (wrong.finish_reason, wrong.tokens) == ("error", ())
    assert wrong.error is not None
    assert message in wrong.error
    assert len(wrong.error) < 200
    assert len(valid.tokens) == 3


def test_text_without_a_tokenizer_gives_an_error_result() -> None:
    (result,) = engine(tokenizer=False).generate(["a"]).results()
    assert result.error == "the prompt is text, but the engine has no tokenizer; give token ids"
    (result,) = engine(tokenizer=False).generate([[1]], stop="x").results()
    assert "stop strings need a tokenizer" in str(result.error)


@pytest.mark.parametrize("stop", [(), "x"])
def test_tokenizer_that_cannot_decode_gives_an_error_result(stop: Any) -> None:
    def encode(text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}

    encoder = Engine(shared_model(), encode, Plan.uniform("full"))
    (result,) = encoder.generate(["a"], max_new_tokens=3, stop=stop).results()
    assert result.finish_reason == "error"
    assert "the tokenizer cannot decode the generation: AttributeError" in str(result.error)
    with pytest.raises(RequestError, match="cannot decode"):
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
    assert "the logits after 0 generated tokens hold NaN or infinity" in str(wrong.error)
    (alone,) = Engine(shared_model(), None, Plan.uniform("full")).generate([[1, 2, 3]], **options)
    assert 7 in alone.tokens or valid.tokens == alone.tokens


def test_failing_tokenizer_gives_an_error_result() -> None:
    class Broken:
        def __call__(self, text: str) -> dict[str, list[int]]:
            raise RuntimeError("no\nvocabulary")

    broken = Engine(shared_model(), Broken(), Plan.uniform("full"))
    (result,) = broken.generate(["a"]).results()
    assert result.error == (
        "the tokenizer cannot encode the prompt: RuntimeError: no vocabulary; give token ids"
    )


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
