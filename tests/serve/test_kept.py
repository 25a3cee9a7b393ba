"""What a stream tells of the rows that are held is what the cache holds."""

from collections import Counter
from typing import Any

import pytest
from hybrids import hybrid_model
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, plans_of, serving
from tiny import shared_model

from kvpolicy import Engine, Plan
from kvpolicy.compat import has_states
from kvpolicy.engine.requests.request import Request
from kvpolicy.serve.kept import held_in_snapshot, held_rows

WATCHED = {"kvpolicy": {"kept": True}}


def spread(held: dict[str, Any]) -> list[int]:
    """The count of every position."""
    return [count for count, times in held["counts"] for _ in range(times)]


RAGGED = Plan.from_dict({"budget": 16, "buffer": 8, "heads": "shared", "stack": ["h2o", "adakv"]})
KEEPING = Plan.from_dict({"budget": 16, "buffer": 8, "prompt": "keep", "stack": ["h2o"]})
PLANS = [*plans_of(full=0, streaming=12, h2o=12, rkv=16).values(), RAGGED, KEEPING]


@given(st.sampled_from(PLANS), st.integers(1, 40), st.integers(1, 60))
def test_held_rows_are_those_of_a_snapshot_counted_one_by_one(
    plan: Plan, num_prompt: int, num_steps: int
) -> None:
    run = Engine(shared_model(), plan=plan, slots=2, chunk=16).open_run()
    run.submit(Request([1, 2, 3], 500, stop_ids=()))
    number = run.submit(Request([5] * num_prompt, 100, stop_ids=()))
    for _ in range(num_steps):
        run.step()
    held = held_rows(run, number)
    assert held is not None
    contents = run.snapshot(number).contents
    expected: Counter[int] = Counter()
    for layer in contents.layers:
        for head in layer.positions.tolist():
            expected.update(position for position in head if position >= 0)
    assert spread(held) == [expected[p] for p in range(contents.seq_len)]
    assert held["of"] == sum(len(layer.positions) for layer in contents.layers)
    assert held["rows"] == [layer.rows for layer in contents.layers]


@pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")
def test_layers_without_rows_do_not_count() -> None:
    run = Engine(hybrid_model("lfm2"), plan=PLANS[1]).open_run()
    number = run.submit(Request([5] * 20, 100, stop_ids=()))
    for _ in range(8):
        run.step()
    held = held_rows(run, number)
    assert held is not None
    assert (held["of"], len(held["rows"])) == (4, 2), "two of four layers, with two heads each"
    assert held == held_in_snapshot(run.snapshot(number))


def test_a_request_without_a_slot_holds_nothing() -> None:
    run = Engine(shared_model(), plan=Plan.uniform("full"), slots=1).open_run()
    numbers = [run.submit(Request([1, 2], 4, stop_ids=())) for _ in range(2)]
    run.step()
    assert held_rows(run, numbers[0]) is not None
    assert held_rows(run, numbers[1]) is None


def events(running: Running, model: str, **body: Any) -> tuple[list[Any], str]:
    """What a stream tells of its rows, and its text."""
    told, text = [], ""
    stream = running.client().completions.create(
        model=model, stream=True, temperature=0, extra_body=WATCHED, **body
    )
    for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        if "kvpolicy" in (chunk.model_extra or {}):
            assert chunk.choices == []
            told.append(chunk.model_extra["kvpolicy"])  # type: ignore[index]
    return told, text


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_a_stream_tells_every_token_once_and_what_is_held_at_its_end(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.serve.kept.EVERY_S", 0.0)
    with serving(plans_of(full=0, streaming=12)) as running:
        told, text = events(running, f"tiny:{policy}", prompt="who is there", max_tokens=30)
        unwatched = running.client().completions.create(
            model=f"tiny:{policy}", prompt="who is there", max_tokens=30, temperature=0
        )
    assert unwatched.choices[0].text == text
    assert {event["num_prompt"] for event in told} == {12}
    assert [event["start"] for event in told] == [
        sum(len(event["tokens"]) for event in told[:i]) for i in range(len(told))
    ]
    assert "".join(token for event in told for token in event["tokens"]) == "who is there" + text
    assert len(told) > 5
    assert [event["ended"] for event in told] == [False] * (len(told) - 1) + [True]
    last = told[-1]["held"]
    counts = spread(last)
    assert len(counts) == 12 + 30 - 1, "the last token never enters the cache"
    if policy == "full":
        assert counts == [last["of"]] * len(counts) == [4] * len(counts)
    else:
        assert set(counts) == {0, 4}, "it keeps the same rows in all heads"
        assert sum(counts) == 4 * last["rows"][0]
        assert counts[0] == counts[-1] == 4, "sinks and recent rows"


def test_a_watched_stream_is_alone() -> None:
    with serving() as running, running.http() as http:
        body = {"model": "tiny", "prompt": ["a", "b"], "stream": True, **WATCHED}
        assert http.post("/v1/completions", json=body).status_code == 400
        body = {"model": "tiny", "prompt": "a", "stream": True, "n": 2, **WATCHED}
        assert http.post("/v1/completions", json=body).status_code == 400
