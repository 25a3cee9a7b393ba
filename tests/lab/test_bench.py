"""The benchmark: fair turns, ratios within a round, and a rival that does the same work."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import CELLS
from shell import Shell
from tiny import greedy_tokens, tiny_model

from kvpolicy.engine import Engine
from kvpolicy.lab import bench
from kvpolicy.lab.bench import GENERATE, Turn, Workload, measure, small_model, standings
from kvpolicy.lab.rival import _pad, generate_once

NAMES = [GENERATE, *(cell.series for cell in CELLS)]


@given(st.integers(1, 9), st.integers(1, 50), st.integers(0, 50), st.integers(0, 99))
def test_prompts_span_the_lengths_asked_for(batch: int, low: int, more: int, seed: int) -> None:
    workload = Workload(batch, low, low + more, new_tokens=2, seed=seed)
    prompts = workload.prompts(61)
    lengths = sorted(map(len, prompts))
    assert len(prompts) == batch
    assert lengths[0] == low
    assert lengths[-1] == (low + more if batch > 1 else low)
    assert prompts == workload.prompts(61)
    assert all(0 <= token < 61 for prompt in prompts for token in prompt)


def test_everybody_takes_a_turn_in_every_round_and_nobody_is_always_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed: list[object] = []

    def turn(*arguments: object) -> tuple[float, None, int]:
        warmed.append(arguments[1])
        return 1.0, None, 0

    monkeypatch.setattr(bench, "_turn", turn)
    turns = list(measure(tiny_model(), CELLS, Workload(2, 3, 5, 9, 0), rounds=3))
    orders = [[turn.name for turn in turns if turn.round == number] for number in range(3)]
    assert [sorted(order) for order in orders] == [sorted(NAMES)] * 3
    assert [order[0] for order in orders] == NAMES
    assert len(warmed) == 4 * len(NAMES), "one warm-up each"


def turn(number: int, name: str, speed: float, share: float | None = None) -> Turn:
    return Turn(number, name, speed, share, kv_bytes=number)


def test_ratios_are_paired_by_round() -> None:
    """Both get slower from round to round, and the ratio is 2 in each."""
    turns = []
    for number, speed in enumerate([100.0, 50.0, 10.0]):
        turns += [turn(number, GENERATE, speed), turn(number, "full", 2 * speed, 0.0)]
        turns += [turn(number, "small", (3 + number) * speed, 0.1 * number)]
    generate, full, small = standings(turns, CELLS)
    assert (generate.ratio, generate.ratio_min, generate.ratio_max) == (1, 1, 1)
    assert (full.ratio, full.ratio_min, full.ratio_max) == (2, 2, 2)
    assert (small.ratio, small.ratio_min, small.ratio_max) == (4, 3, 5)
    assert full.rounds == (200, 100, 20)
    assert full.decode_tok_s == 100
    assert small.policy_share == pytest.approx(0.1)
    assert generate.policy_share is None
    assert (full.budget, small.budget) == (None, 16)


def test_a_round_that_was_broken_off_does_not_count() -> None:
    whole = [turn(0, name, 10.0, 0.0) for name in NAMES]
    assert len(standings([*whole, turn(1, GENERATE, 99.0)], CELLS)) == len(NAMES)
    assert standings([*whole, turn(1, GENERATE, 99.0)], CELLS)[0].rounds == (10.0,)
    assert standings(whole[:2], CELLS) == []


def test_the_rival_does_what_the_full_cache_does() -> None:
    """Left-padded generate gives the tokens of the engine, and the bytes of a full cache."""
    model = tiny_model("qwen2", seed=3)
    assert model.generation_config is not None
    prompts = [[5, 9, 1, 7], [3, 2]]
    _, kv_bytes = generate_once(model, prompts, 6)
    layers, heads, head_dim, in_fp32 = 2, 2, 8, 4
    # The last token is never fed back, so that its row is missing.
    assert kv_bytes == 2 * layers * len(prompts) * heads * (4 + 6 - 1) * head_dim * in_fp32
    run = Engine(model, None, CELLS[0].plan, slots=2).generate(
        prompts, max_new_tokens=6, stop_ids=()
    )
    for result, prompt in zip(run.results(), prompts, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 6)


def test_prompts_are_padded_on_the_left() -> None:
    token_ids, mask = _pad([[1, 2, 3], [4]], torch.device("cpu"))
    assert token_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_model_has_thirty_million_parameters_and_never_ends_a_text() -> None:
    model = small_model(0, max_positions=64)
    assert 27e6 < model.num_parameters() < 33e6
    assert model.config.eos_token_id is None
    before = torch.get_rng_state()
    again = small_model(0, max_positions=64)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_command_prints_ratios_and_keeps_them(kvpolicy: Shell, tmp_path: Path) -> None:
    sizes = ("--batch", 2, "--prompt-min", 4, "--prompt-max", 9, "--new-tokens", 8)
    words = ("--budget", 8, "--buffer", 4, "--rounds", 2, "--policies", "full,streaming")
    output = tmp_path / "bench.json"
    found = kvpolicy("bench", *sizes, *words, "--output", output, "--json")
    assert found.status == 0, found.err
    assert found.out == output.read_text(encoding="utf-8")
    assert [one["name"] for one in found.json["standings"]] == [
        GENERATE,
        "full cache",
        "StreamingLLM",
    ]
    for one in found.json["standings"]:
        assert one["ratio_min"] <= one["ratio"] <= one["ratio_max"]
        assert len(one["rounds"]) == 2
        assert one["decode_tok_s"] > 0
    assert found.json["workload"]["new_tokens"] == 8
    assert "round 2" in found.err
    plain = kvpolicy("bench", *sizes, *words)
    assert "x generate" in plain.out
