"""Adaptive steering against an oracle that processes the whole text at every step."""

import re
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, seeds
from tiny import shared_model, tiny_model, word_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, PrefixStore
from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.errors import KVPolicyError, SteeringError
from kvpolicy.toolkit.steering_vectors import Calibration, SteeringVector, save_steering_vectors
from skipkv_plugin.policy import SkipKV
from skipkv_plugin.steering import is_non_execution, strength

WORDS = [" a", " b", " x", "Wait", " again", " Wait", "<think>", "</think>", "\n\n", ".\n\n"]
WORDS += [" waiting", "Alter", "natively", "\n"]
IDS = {word: number for number, word in enumerate(WORDS)}
THINK, PARAGRAPH = IDS["<think>"], IDS["\n\n"]
HIDDEN, LAYER, BUFFER = 32, 1, 5


TOKENIZER = word_tokenizer(IDS, " a")


@pytest.fixture(scope="module")
def vector_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = torch.Generator().manual_seed(3)
    one = SteeringVector(
        vector=torch.randn(HIDDEN, generator=rng),
        layer=LAYER,
        calibration=Calibration(model="tiny"),
    )
    path = tmp_path_factory.mktemp("vectors") / "tiny.safetensors"
    save_steering_vectors(path, [one])
    return path


def model_of_words(seed: int) -> PreTrainedModel:
    return tiny_model(vocab=len(WORDS), dtype=torch.float64, seed=seed)


class Oracle:
    """Greedy decoding with transformers' cache; steering is computed from the whole text."""

    def __init__(self, model: PreTrainedModel, vector: Tensor, **knobs: float) -> None:
        self.model, self.vector, self.knobs = model, vector.double(), knobs

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens, cache = list(prompt), None
        new = list(prompt)
        while len(tokens) < len(prompt) + count:
            change = self.change(tokens, len(prompt)) if new != prompt or cache else 0.0

            def add(_: nn.Module, arguments: tuple, change: Any = change) -> tuple:
                return (arguments[0] + change, *arguments[1:])

            handle = self.model.model.layers[LAYER].register_forward_pre_hook(add)
            with torch.inference_mode():
                output = self.model(torch.tensor([new]), **cache_argument(cache), use_cache=True)
            handle.remove()
            cache = cache_in(output)
            new = [int(output.logits[0, -1].argmax())]
            tokens += new
        return tokens[len(prompt) :]

    def change(self, tokens: list[int], prompt_len: int) -> Tensor | float:
        """The change of the hidden state at the last token."""
        inside = False
        for token in tokens:
            inside = token == THINK or (inside and WORDS[token] != "</think>")
        if not inside or "\n\n" not in WORDS[tokens[-1]]:
            return 0.0
        # The strength was computed when the buffer was last full.
        num_read = len(tokens) - 1 - prompt_len
        shown = tokens[: prompt_len + num_read // BUFFER * BUFFER]
        return self.alpha(shown, prompt_len) * self.vector

    def alpha(self, shown: list[int], prompt_len: int) -> float:
        ends = [WORDS[token] in ("\n", "\n\n", ".\n\n") for token in shown]
        num = 0
        for begin, end, _ in reference.sentences(ends, merge=True):
            text = "".join(WORDS[token] for token in shown[begin:end])
            num += begin >= prompt_len and bool(
                re.search(r"(?i)\b(wait|alternatively|again)\b", text)
            )
        return min(self.knobs["alpha_0"] + self.knobs["gamma"] * num, self.knobs["alpha_max"])


@costly
@given(
    st.lists(
        st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=9), min_size=1, max_size=4
    ),
    seeds.map(lambda seed: seed % 8),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([1.5, 9.0]),
    st.integers(1, 3),
)
def test_tokens_equal_the_oracle(
    vector_file: Path,
    prompts: list[list[int]],
    seed: int,
    alpha_0: float,
    gamma: float,
    alpha_max: float,
    slots: int,
) -> None:
    knobs = {"alpha_0": alpha_0, "gamma": gamma, "alpha_max": alpha_max}
    policy = SkipKV(vector=str(vector_file), **knobs)
    model = model_of_words(seed)
    plan = Plan.uniform(policy, budget=200, buffer=BUFFER)
    run = Engine(model, TOKENIZER, plan, slots=slots).generate(prompts, max_new_tokens=24)
    assert policy._direction is not None
    oracle = Oracle(model, policy._direction.vector, **knobs)
    for prompt, result in zip(prompts, run.results(), strict=True):
        assert list(result.tokens) == oracle.generate(prompt, 24)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"count_prompt": True, "keyword_match": "ids", "gamma": 0.7},
        {"think_in_prompt": "any", "protect_prompt": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", ["evict", "keep"])
def test_prompts_that_begin_alike_are_steered_as_without_a_store(
    vector_file: Path, knobs: dict[str, Any], prompt: Any
) -> None:
    """What was found in the beginning of one prompt is right for a longer and a shorter one."""
    rng = torch.Generator().manual_seed(7)
    common = torch.randint(len(WORDS), (40,), generator=rng).tolist()
    texts = [[*common[:end], *common[:own]] for end, own in ((40, 9), (40, 1), (24, 3), (31, 30))]
    knobs = {"vector": str(vector_file), "window_size": 4, "tau": 0.3, **knobs}
    plan = Plan.uniform("skipkv", budget=40, buffer=BUFFER, prompt=prompt, knobs={"skipkv": knobs})
    model, store = model_of_words(0), PrefixStore(2**30, block_tokens=4)
    fresh = Engine(model, TOKENIZER, plan).generate(texts, max_new_tokens=40).results()
    engine = Engine(model, TOKENIZER, plan, prefix_store=store)
    for _ in range(2):
        results = engine.generate(texts, max_new_tokens=40).results()
        assert [one.tokens for one in results] == [one.tokens for one in fresh]
    assert store.stats.reused_tokens > 100


@pytest.mark.nightly
def test_steering_changes_tokens(vector_file: Path) -> None:
    """Otherwise the test above would be vacuous."""

    def tokens(**knobs: Any) -> list[tuple[int, ...]]:
        plan = Plan.uniform("skipkv", budget=200, buffer=BUFFER, knobs={"skipkv": knobs})
        prompts = [[THINK, IDS[" again"], IDS[" a"], n, PARAGRAPH] for n in range(6)]
        runs = [
            Engine(model_of_words(seed), TOKENIZER, plan).generate(prompts, max_new_tokens=60)
            for seed in range(4)
        ]
        return [result.tokens for run in runs for result in run.results()]

    plain, steered = tokens(), tokens(vector=str(vector_file))
    assert plain != steered
    assert tokens(vector=str(vector_file), alpha_0=0.0, gamma=0.0) == plain
    assert tokens(vector=str(vector_file), gamma=3.0, alpha_max=0) != steered


@pytest.mark.parametrize(
    ("text", "by_text", "by_ids"),
    [
        ("Wait a b", True, True),
        (" a Wait", True, False),  # a different token with a leading space
        (" a again", True, False),
        (" waiting a", False, False),
        ("Alternatively x", True, True),
        (" xnatively", False, True),  # only the last piece is matched
        (" a b", False, False),
    ],
)
def test_non_execution_is_found_by_text_or_ids(text: str, by_text: bool, by_ids: bool) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert is_non_execution(ids, TOKENIZER, ["Wait", "Alternatively"], "ids") == by_ids
    keywords = SkipKV().keywords
    assert is_non_execution(ids, TOKENIZER, keywords, "text") == by_text


def test_strength_grows_up_to_alpha_max() -> None:
    knobs = {"alpha_0": 1.25, "gamma": 0.02, "alpha_max": 2.0}
    assert strength(0, **knobs) == 1.25
    assert strength(10, **knobs) == pytest.approx(1.45)
    assert strength(100, **knobs) == 2.0
    assert strength(100, alpha_0=1.0, gamma=0.02, alpha_max=0.0) == pytest.approx(3.0)


def test_vector_of_another_model_raises(vector_file: Path) -> None:
    model = tiny_model(vocab=len(WORDS), num_heads=8, num_kv_heads=2)
    plan = Plan.uniform("skipkv", budget=16, knobs={"skipkv": {"vector": str(vector_file)}})
    with pytest.raises(SteeringError, match=r"32 .* 64"):
        Engine(model, TOKENIZER, plan).generate([[THINK, 1]], max_new_tokens=3).results()


def test_unknown_vector_raises() -> None:
    with pytest.raises(KVPolicyError, match="'nobody'"):
        Plan.uniform("skipkv", budget=16, knobs={"skipkv": {"vector": "nobody"}}).resolve(2)


def test_tokenizer_without_think_tags_raises(vector_file: Path) -> None:
    fast = word_tokenizer({"a": 0, "\n\n": 1}, "a")
    knobs: dict[str, Any] = {"vector": str(vector_file)}

    def run() -> None:
        plan = Plan.uniform("skipkv", budget=16, knobs={"skipkv": knobs})
        Engine(shared_model(), fast, plan).generate([[0, 1]], max_new_tokens=3).results()

    with pytest.raises(KVPolicyError, match="<think>"):
        run()
    knobs["think"] = []
    run()


def test_resolved_plan_names_its_vector_with_a_hash(vector_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(vector_file.read_bytes())

    def resolved(reference: str) -> Any:
        knobs = {"skipkv": {"vector": reference}}
        return Plan.uniform("skipkv", budget=16, knobs=knobs).resolve(2)

    before = resolved(str(copy))
    (hashed,) = {spec["vector"] for spec in before.to_dict()["layers"][0]["stack"]}
    assert hashed.startswith(f"{copy}#")
    assert resolved(hashed).digest() == before.digest()
    other = SteeringVector(
        vector=torch.ones(HIDDEN), layer=LAYER, calibration=Calibration(model="tiny")
    )
    save_steering_vectors(copy, [other])
    assert resolved(str(copy)).digest() != before.digest()
    with pytest.raises(SteeringError, match="vector"):
        resolved(hashed)
    copy.unlink()
    with pytest.raises(SteeringError, match="vector"):
        resolved(hashed)
