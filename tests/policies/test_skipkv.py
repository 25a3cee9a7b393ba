"""SkipKV against its definition in plain loops: eq. 6 and the rows it keeps."""

import re
from importlib.resources import files
from typing import Any

import attrs
import pytest
import reference
import torch
from compare import assert_best_rows, heads
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, costly, fill, prompts
from tiny import shared_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl, load_policy
from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.hooks.discovery import load_policy_class
from kvpolicy.testing import Shown, keep_rows, replay

END = 3
IDS: dict[str, Any] = {"delimiters": [END]}


def show(drawn: Drawn, seed: int, num_kinds: int = 3) -> Shown:
    """Tokens with some delimiters, and hidden states of few kinds, so that some repeat."""
    rng = torch.Generator().manual_seed(seed)
    size = (drawn.keys.shape[0], drawn.num_rows)
    token_ids = torch.randint(5, size, generator=rng)
    kinds = torch.randn(num_kinds, 6, generator=rng)
    # All tokens of a sentence have the same kind.
    stretch = (token_ids == END).cumsum(1) - (token_ids == END).long()
    kind = torch.randint(num_kinds, size, generator=rng).gather(1, stretch)
    noise = 0.02 * torch.randn(*size, 6, generator=rng)
    return Shown(token_ids, kinds[kind] + noise)


def expected_scores(base: list[float], shown: Shown, b: int, **knobs: Any) -> list[float]:
    ends = [token == END for token in shown.token_ids[b].tolist()]
    spans = reference.sentences(ends, knobs.get("merge_delimiters", True))
    vectors = reference.sentence_vectors(shown.hidden_states[b].tolist(), spans)
    found = reference.redundant_sentences(vectors, knobs["tau"], knobs.get("pair", "max"))
    return reference.skipkv(base, range(len(base)), spans, found)


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        **IDS,
        "tau": draw(st.sampled_from([0.7, 0.9, 0.95])),
        "window_size": draw(st.integers(1, 8)),
        "mix_lambda": draw(st.sampled_from([0.1, 0.5])),
        "kernel_size": draw(st.sampled_from([1, 7])),
        "merge_delimiters": draw(st.booleans()),
        "pair": draw(st.sampled_from(["max", "last"])),
    }


@given(st.data(), knobs())
def test_keeps_the_rows_of_the_reference(data: st.DataObject, knobs: dict[str, Any]) -> None:
    window = knobs["window_size"]
    drawn = data.draw(caches(min_rows=window + 8))
    shown = show(drawn, data.draw(st.integers(0, 99)))
    budget = data.draw(budgets(drawn.num_rows, min_budget=window))
    kept = keep_rows(
        "skipkv", drawn.keys, drawn.values, drawn.queries, budget=budget, shown=shown, **knobs
    )
    token_knobs = {key: knobs[key] for key in ("window_size", "mix_lambda", "kernel_size")}
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        base = reference.rkv(keys, queries, **token_knobs)
        # Larger scores are scaled, which the reference does not do.
        assume(max(map(abs, base)) < knobs["tau"] / 2)
        scores = expected_scores(base, shown, b, **knobs)
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget, atol=1e-5)


def test_published_example() -> None:
    """S1 is evicted completely; S2 and S3 lose single tokens, different ones in each head."""
    gram = torch.tensor([[1, 0.37, 0.96], [0.37, 1, 0.50], [0.96, 0.50, 1]], dtype=torch.float64)
    vectors = torch.linalg.cholesky(gram).float()
    token_ids = torch.tensor([[0] * 9 + [END]] * 3 + [[0] * 4 + [0] * 6]).reshape(1, -1)
    states = torch.cat([vectors.repeat_interleave(10, 0), torch.zeros(10, 3)])[None]
    keys = fill((1, 3, 40, 8), "gauss", 0)
    queries = fill((1, 6, 40, 8), "gauss", 1)
    shown = Shown(token_ids, states)
    kept = keep_rows("skipkv", keys, keys, queries, budget=26, shown=shown, **IDS)
    assert int(kept.min()) == 10
    assert len({tuple(head) for head in kept[0].tolist()}) == 3
    # Fewer rows are evicted than the sentence has: only rows of that sentence are evicted.
    kept = keep_rows("skipkv", keys, keys, queries, budget=34, shown=shown, **IDS)
    assert torch.equal(kept[:, :, 4:], torch.arange(10, 40).expand(1, 3, 30))


@attrs.define(eq=False)
class LargeScores:
    """Scores of both signs, far larger than any similarity; the newest rows are pinned."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        scores = 50 * keys.sum(dim=-1)
        scores[:, :, -4:] = torch.inf
        return scores


BASES = {
    "large": (LargeScores(), 0),
    "h2o": (load_policy("h2o", n_recent=4), 0),
    "snapkv": (load_policy("snapkv", window_size=4), 0),
    "streaming": (load_policy("streaming", n_sink=4), 4),
}


@pytest.mark.parametrize("base", BASES)
@given(drawn=caches(min_rows=20, max_rows=32), seed=st.integers(0, 99))
def test_redundant_sentences_are_evicted_first_under_any_base(
    base: str, drawn: Drawn, seed: int
) -> None:
    policy, n_sink = BASES[base]
    wrapper = load_policy("skipkv", tau=0.9, window_size=1, **IDS)
    shown, budget = show(drawn, seed), 12
    kept = keep_rows(
        [policy, wrapper], drawn.keys, drawn.values, drawn.queries, budget=budget, shown=shown
    )
    pinned = {*range(n_sink), *range(drawn.num_rows - 4, drawn.num_rows)}
    for b, of_heads in enumerate(kept.tolist()):
        scores = expected_scores([0.0] * drawn.num_rows, shown, b, tau=0.9)
        marked = {t for t, score in enumerate(scores) if score < 0} - pinned
        num_leaving = drawn.num_rows - budget
        for head in of_heads:
            assert len(marked - set(head)) == min(len(marked), num_leaving)


def test_without_observed_tokens_only_the_token_score_counts() -> None:
    keys, queries = fill((2, 2, 40, 8), "dup", 0), fill((2, 4, 40, 8), "gauss", 1)
    kept = keep_rows("skipkv", keys, keys, queries, budget=20, **IDS)
    assert torch.equal(kept, keep_rows("rkv", keys, keys, queries, budget=20))


@given(caches(min_rows=24, max_rows=32, batch=2), st.integers(0, 99))
def test_redundant_rows_stay_redundant_until_evicted(drawn: Drawn, seed: int) -> None:
    """Redundant rows that a compaction keeps are the first to be evicted at the next."""
    shown, window = show(drawn, seed, num_kinds=2), 2
    rounds = {"prompt": 16, "compact_at": [16, 20, drawn.num_rows]}
    inputs = (drawn.keys, drawn.values, drawn.queries)
    knobs = {**IDS, "tau": 0.9, "window_size": window}
    answer = replay("skipkv", *inputs, budget=12, shown=shown, **rounds, **knobs)
    held = [[set(range(16))] * drawn.keys.shape[1] for _ in range(2)]
    seen = 0
    for kept, count in zip(answer, rounds["compact_at"], strict=True):
        known = Shown(shown.token_ids[:, :count], shown.hidden_states[:, :count])
        for b, of_heads in enumerate(kept.tolist()):
            scores = expected_scores([0.0] * count, known, b, **knobs)
            for h, head in enumerate(of_heads):
                left = (held[b][h] | set(range(seen, count))) - set(head)
                spared = [t for t in head if t < count - window and scores[t] < 0]
                assert not spared or all(scores[t] < 0 for t in left)
                held[b][h] = set(head)
        seen = count


def test_one_token_sentences_are_never_redundant_without_merging() -> None:
    token_ids = torch.tensor([[0, END, END, 0, END, END, 0, 0, 0, 0]])
    keys, queries = fill((1, 1, 10, 4), "gauss", 0), fill((1, 1, 10, 4), "gauss", 1)
    shown = Shown(token_ids, torch.ones(1, 10, 3))
    knobs = {**IDS, "window_size": 1, "merge_delimiters": False}
    kept = keep_rows("skipkv", keys, keys, queries, budget=6, shown=shown, **knobs)
    assert kept.tolist() == [[[2, 5, 6, 7, 8, 9]]]


def test_protect_prompt_keeps_the_prompt() -> None:
    drawn = Drawn(*(fill((2, 2, 30, 8), "gauss", n) for n in range(3)), kind="gauss", seed=0)
    shown = Shown(torch.full((2, 30), END), torch.ones(2, 30, 4))
    inputs = (drawn.keys, drawn.values, fill((2, 4, 30, 8), "gauss", 4))
    rounds = {"prompt": 10, "compact_at": [30]}
    knobs = {**IDS, "merge_delimiters": False, "protect_prompt": True}
    (kept,) = replay("skipkv", *inputs, budget=20, shown=shown, **rounds, **knobs)
    assert torch.equal(kept[:, :, :10], torch.arange(10).expand(2, 2, 10))


@pytest.mark.nightly
@costly
@given(prompts(count=3, min_len=6), st.integers(1, 3))
def test_batched_sequences_equal_sequences_alone(prompts: list[list[int]], slots: int) -> None:
    model = shared_model(dtype=torch.float64)
    knobs = {"skipkv": {"delimiters": list(range(9)), "tau": 0.2}}
    plan = Plan.uniform("skipkv", budget=12, buffer=5, knobs=knobs)
    engine = Engine(model, plan=plan, slots=slots)
    batch = engine.generate(prompts, max_new_tokens=16).results()
    single = Engine(model, plan=plan, slots=1)
    for prompt, result in zip(prompts, batch, strict=True):
        (alone,) = single.generate([prompt], max_new_tokens=16).results()
        assert result.tokens == alone.tokens
        assert result.compactions > 0
        assert result.peak_rows <= 17


def test_missing_tokenizer_raises() -> None:
    plan = Plan.uniform("skipkv", budget=16)
    with pytest.raises(KVPolicyError, match=r"skipkv.*tokenizer"):
        Engine(shared_model(), plan=plan).generate([[1, 2]]).results()
    engine = Engine(shared_model(), tiny_tokenizer(), plan)
    results = engine.generate(["ab.\nc"], max_new_tokens=4).results()
    assert results[0].error is None


def test_budget_below_the_window_raises() -> None:
    with pytest.raises(BudgetError, match="protect"):
        Plan.uniform("skipkv", budget=7).resolve(2)


@pytest.mark.parametrize("name", ["skipkv", "skipkv_batches"])
def test_readme_lists_every_knob_with_its_default(name: str) -> None:
    text = files("skipkv_plugin").joinpath("README.md").read_text(encoding="utf-8")
    section = text.partition(f"## Knobs of `{name}`\n")[2].partition("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.M))
    fields = [field for field in attrs.fields(load_policy_class(name)) if field.init]
    assert documented == {field.name: repr(field.default) for field in fields}
