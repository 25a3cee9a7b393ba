"""A server with a prefix store: what it computes once, counts and finds again."""

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from replicas import config_of, routed
from served_command import served_command
from serving import Running, metrics, of_plan, plans_of, serving, until
from shell import Shell, refusal
from small_disk import fill, on_small_disk
from tiny import tiny_model, tiny_tokenizer

from kvpolicy import PrefixStore
from kvpolicy.serve.logs import logging_to

BLOCK = 4
BEGINNING = "1 + 2 = 3, and 3 + 4 = 7. now, 5 + 6 = 11."  # longer than the budget of h2o
PLANS = plans_of(full=0, h2o=12)


def a_store(**options: Any) -> PrefixStore:
    return PrefixStore(1 << 22, block_tokens=BLOCK, **options)


def cached(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    found = usage.prompt_tokens_details.cached_tokens
    assert found is not None
    return found


def complete(client: openai.OpenAI, prompt: Any, model: str = "tiny", **options: Any) -> Any:
    given = {"max_tokens": 12, "temperature": 0} | options
    extra = {"kvpolicy": {"token_ids": True}}
    return client.completions.create(model=model, prompt=prompt, extra_body=extra, **given)


def tokens(answer: Any) -> list[list[int]]:
    return [choice.model_extra["token_ids"] for choice in answer.choices]


# Answers


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["full", "h2o"])
def test_a_beginning_that_was_computed_is_cached_and_tokens_are_those_without_a_store(
    plan: str,
) -> None:
    prompts = [f"{BEGINNING} {end}" for end in ("a", "bc", "def")]
    with serving(PLANS) as plain, serving(PLANS, prefix_store=a_store()) as running:
        expected = [complete(plain.client(), one, f"tiny:{plan}") for one in prompts]
        found = [complete(running.client(), one, f"tiny:{plan}") for one in prompts]
    assert [tokens(one) for one in found] == [tokens(one) for one in expected]
    assert [cached(one.usage) for one in expected] == [0, 0, 0]
    first, *others = (cached(one.usage) for one in found)
    assert first == 0
    # Once a prompt was compacted, states are further apart.
    least = len(BEGINNING) - BLOCK if plan == "full" else 12
    assert all(least <= num <= len(BEGINNING) + 1 for num in others)


def test_plans_do_not_find_what_others_have_stored() -> None:
    with serving(PLANS, prefix_store=a_store()) as running:
        assert cached(complete(running.client(), BEGINNING, "tiny:full").usage) == 0
        assert cached(complete(running.client(), BEGINNING, "tiny:h2o").usage) == 0
        assert cached(complete(running.client(), BEGINNING, "tiny:full").usage) > 0


def test_a_prompt_counts_once_for_all_of_its_choices() -> None:
    short = "abcdefg"
    with serving(slots=4, prefix_store=a_store()) as running:
        client = running.client()
        new = complete(client, BEGINNING, n=3)
        assert cached(new.usage) == 0, "one of the choices has computed it"
        again = complete(client, [BEGINNING, short], n=2)
        assert again.usage.prompt_tokens == len(BEGINNING) + len(short)
        once = cached(complete(client, BEGINNING).usage)
        assert 0 < once < len(BEGINNING)
        assert cached(again.usage) == once, "the other prompt was new"


def test_a_stream_tells_it_with_its_usage() -> None:
    with serving(prefix_store=a_store()) as running:
        client = running.client()
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        first, second = ([*complete(client, BEGINNING, **options)][-1] for _ in range(2))
    assert cached(first.usage) == 0
    assert len(BEGINNING) - BLOCK <= cached(second.usage) < len(BEGINNING)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_the_cached_tokens_of_the_usage(stream: bool) -> None:
    lines, options = io.StringIO(), {"n": 2, "stream": stream}
    options |= {"stream_options": {"include_usage": True}} if stream else {}
    with logging_to(lines, as_json=True), serving(slots=4, prefix_store=a_store()) as running:
        client = running.client()
        expected = []
        for prompts in ([BEGINNING], [BEGINNING, f"{BEGINNING} a"]):
            answer = complete(client, prompts, **options)
            expected.append(cached(([*answer][-1] if stream else answer).usage))
        with pytest.raises(openai.BadRequestError):
            complete(client, BEGINNING, max_tokens=1000)
        until(lambda: lines.getvalue().count('"request"') == 3)
    *found, refused = [json.loads(line) for line in lines.getvalue().splitlines()][:3]
    assert [one["cached_tokens"] for one in found] == expected
    assert expected[0] == 0 < expected[1]
    assert "cached_tokens" not in refused, "nothing was looked up"


# Conversations


def say(running: Running, talk: list[Any], plan: str) -> Any:
    return running.client().chat.completions.create(
        model=f"tiny:{plan}", messages=talk, max_tokens=20, temperature=0
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["full", "h2o"])
def test_a_chat_that_goes_on_reuses_question_and_answer(plan: str) -> None:
    talk: list[Any] = [{"role": "user", "content": BEGINNING}]
    with serving(PLANS, prefix_store=a_store()) as running:
        first = say(running, talk, plan)
        answer = first.choices[0].message.content
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "so?"}]
        second = say(running, talk, plan)
        found = metrics(running)
    whole = first.usage.prompt_tokens + first.usage.completion_tokens
    assert cached(second.usage) == whole - 1, "the newest token has no rows yet"
    assert found["prefix_turns_total", ()] == 1
    if plan == "full":  # what evicts knows more than a prefill of the whole text
        with serving(PLANS) as plain:
            expected = say(plain, talk, plan)
        assert second.choices[0].message == expected.choices[0].message


@pytest.mark.nightly
def test_a_chat_whose_answer_was_changed_reuses_what_comes_before_it() -> None:
    talk: list[Any] = [{"role": "user", "content": BEGINNING}]
    with serving(PLANS, prefix_store=a_store()) as running:
        first = say(running, talk, "full")
        talk += [{"role": "assistant", "content": "changed"}, {"role": "user", "content": "so?"}]
        second = say(running, talk, "full")
        assert metrics(running)["prefix_turns_total", ()] == 0
    question = first.usage.prompt_tokens
    assert question - BLOCK <= cached(second.usage) <= question


def test_a_store_of_prompts_only_keeps_no_conversation() -> None:
    talk: list[Any] = [{"role": "user", "content": BEGINNING}]
    with serving(PLANS, prefix_store=a_store(conversations=False)) as running:
        first = say(running, talk, "full")
        answer = first.choices[0].message.content
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "so?"}]
        second = say(running, talk, "full")
        assert metrics(running)["prefix_turns_total", ()] == 0
    question = first.usage.prompt_tokens
    assert question - BLOCK <= cached(second.usage) <= question


# Metrics


def test_metrics_tell_what_was_found_and_what_is_held() -> None:
    store = a_store()
    with serving(PLANS, prefix_store=store) as running:
        usages = [complete(running.client(), f"{BEGINNING} {end}").usage for end in "ab"]
        usages.append(complete(running.client(), BEGINNING, "tiny:h2o").usage)
        found = metrics(running)
        stats = store.stats
    for name, number in {
        "hits_total": stats.hits,
        "misses_total": stats.misses,
        "evictions_total": stats.evictions,
        "refused_total": stats.refused,
        "held_bytes": stats.num_bytes,
        "blocks": stats.num_blocks,
        "capacity_bytes": 1 << 22,
        "spilled_bytes": 0,
        "failed": 0,
    }.items():
        assert found[f"prefix_{name}", ()] == number
    assert stats.hits > 0 < stats.misses
    assert stats.num_bytes > 0 < stats.num_blocks
    reused, computed = (
        {plan: found[f"prefix_{name}_tokens_total", of_plan(plan)] for plan in PLANS}
        for name in ("reused", "computed")
    )
    assert reused == {"full": sum(map(cached, usages[:2])), "h2o": 0}
    for plan in PLANS:
        prompts = found["engine_prompt_tokens_total", of_plan(plan)]
        assert reused[plan] + computed[plan] == prompts


@pytest.mark.slow
def test_a_full_store_and_its_folder_are_counted(tmp_path: Path) -> None:
    store = PrefixStore(16 << 10, block_tokens=BLOCK, spill=tmp_path)
    with serving(prefix_store=store) as running:
        for end in "abcde":
            complete(running.client(), end * 40)
        found = metrics(running)
        assert found["prefix_evictions_total", ()] > 0
        assert 0 < found["prefix_held_bytes", ()] <= 16 << 10
        assert found["prefix_spilled_blocks", ()] > 0
        size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert found["prefix_spilled_bytes", ()] == size


def test_without_a_store_there_are_no_metrics_of_one() -> None:
    with serving() as running:
        complete(running.client(), BEGINNING)
        assert not [name for name, _ in metrics(running) if name.startswith("prefix")]


# Files


@pytest.mark.slow
def test_a_server_that_is_started_again_finds_what_was_held(tmp_path: Path) -> None:
    with serving(prefix_store=a_store(spill=tmp_path)) as running:
        first = complete(running.client(), BEGINNING)
        assert metrics(running)["prefix_spilled_blocks", ()] == 0, "it is held in memory"
    assert [*tmp_path.glob("*.safetensors")]
    with serving(prefix_store=a_store(spill=tmp_path)) as again:
        second = complete(again.client(), BEGINNING)
        found = metrics(again)
    assert tokens(second) == tokens(first)
    assert cached(second.usage) >= len(BEGINNING) - BLOCK
    assert found["prefix_spill_loads_total", ()] > 0


def test_what_a_store_warns_of_is_a_line_of_the_log(tmp_path: Path) -> None:
    with serving(prefix_store=a_store(spill=tmp_path)) as running:
        complete(running.client(), BEGINNING)
    damaged = next(tmp_path.glob("*.safetensors"))
    damaged.write_bytes(b"damaged")
    stream = io.StringIO()
    with logging_to(stream, as_json=True):
        a_store(spill=tmp_path)
    line = json.loads(stream.getvalue().splitlines()[0])
    assert line["level"] == "warning"
    assert f"the prefix store leaves out {damaged}" in line["event"]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="forks its children")
def test_a_server_whose_disk_is_full_goes_on_and_says_so_once(tmp_path: Path) -> None:
    prompts = [end * 40 for end in "abcdefgha"]
    with serving() as plain:
        expected = [tokens(complete(plain.client(), one)) for one in prompts]

    def body() -> None:
        other, stream = fill(tmp_path), io.StringIO()
        store = PrefixStore(16 << 10, block_tokens=BLOCK, spill=tmp_path)
        with logging_to(stream, as_json=True), serving(prefix_store=store) as running:
            found = [tokens(complete(running.client(), one)) for one in prompts]
            counted = metrics(running)
            other.unlink()  # what is in memory is written when the server stops
        assert found == expected
        assert counted["prefix_evictions_total", ()] > 0
        assert counted["prefix_spilled_blocks", ()] == 0
        assert counted["prefix_failed", ()] == 1
        events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
        no_more, again = [event for event in events if "the prefix store" in event]
        assert f"writes no more blocks to {tmp_path}: No space left on device" in no_more
        assert f"writes blocks to {tmp_path} again" in again
        assert [*tmp_path.glob("*.safetensors")]

    on_small_disk(tmp_path, 1 << 20, body)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a user has it."""
    base = tmp_path_factory.mktemp("prefixes") / "mine"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    return base


@pytest.mark.slow
def test_the_command_serves_with_a_store_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    options: tuple[object, ...] = ("--model", folder, "--policy", "full", "--prefix-cache", "4MiB")
    options += ("--prefix-block", BLOCK, "--prefix-spill", spill, "--prefix-spill-bytes", "1MiB")
    options += ("--prefix-prompts-only",)
    body = {"model": "mine", "prompt": BEGINNING, "max_tokens": 4, "temperature": 0}
    with served_command(tmp_path, *options) as served, served.http() as http:
        first, again = (http.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
        num_blocks = (first["prompt_tokens"] - 1) // BLOCK  # no end of an answer
        assert f"kvpolicy_prefix_blocks {num_blocks}.0\n" in http.get("/metrics").text
        assert served.end() == 0
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again)]
    assert found[0] == 0
    assert found[1] >= len(BEGINNING) - BLOCK
    assert any(file.stat().st_size for file in spill.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "words"),
    {
        "--prefix-cache much": "--prefix-cache was given 'much'; give bytes with a unit",
        "--prefix-block 8": "--prefix-block was given without --prefix-cache; add",
        "--prefix-prompts-only": "--prefix-prompts-only was given without --prefix-cache; add",
        "--prefix-spill a": "--prefix-spill was given without --prefix-cache; add",
        "--prefix-cache 1MiB --prefix-spill-bytes 1MB": "given without --prefix-spill; add",
        "--prefix-cache 1MiB --prefix-eviction lro": "no block eviction is named 'lro'",
        "--prefix-cache 1MiB --prefix-spill /dev/null/a": "cannot be used: Not a directory",
        "--prefix-cache 1MiB --on ray --prefix-spill a": "replicas cannot share a folder",
        "--prefix-cache 1MiB --on ray --prefix-eviction lro": "no block eviction is named 'lro'",
    }.items(),
    ids=str,
)
def test_wrong_options_are_refused_before_the_model_is_loaded(
    kvpolicy: Shell, tmp_path: Path, options: str, words: str
) -> None:
    given = ("--port", 0, "--model", tmp_path / "none", "--policy", "full")
    assert words in refusal(kvpolicy("serve", *given, *options.split()))


# Replicas


def test_each_replica_has_a_store_of_its_own(folder: Path) -> None:
    config = config_of(folder, prefix_store={"capacity": 1 << 22, "block_tokens": BLOCK})

    async def ask() -> None:
        async with routed(config) as server:
            for replica, expected in ((0, 0), (0, len(BEGINNING) - BLOCK), (1, 0)):
                server.replicas.replicas.sort(key=lambda one: one.name, reverse=replica == 1)
                answer = await server.client.completions.create(
                    model="tiny:full", prompt=BEGINNING, max_tokens=2
                )
                assert cached(answer.usage) >= expected
                assert bool(cached(answer.usage)) == bool(expected)
            reused = 'kvpolicy_prefix_reused_tokens_total{plan="full",replica='
            assert await server.metric(f'{reused}"a"') >= len(BEGINNING) - BLOCK
            assert await server.metric(f'{reused}"b"') == 0

    asyncio.run(ask())
