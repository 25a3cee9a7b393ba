"""``kvpolicy run``: text on stdout, figures on stderr, the same tokens from every entry point."""

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from shell import Shell

from kvpolicy.cli.prompts import read_prompts
from kvpolicy.cli.run import _in_order
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import KVPolicyError
from kvpolicy.model.loading import load_model
from kvpolicy.plan.plan import Plan

PROMPTS = [f"{n} + {n} = ?" for n in range(3)]
H2O = ("--policy", "h2o", "--budget", "16", "--buffer", "8", "--max-new-tokens", "30")


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Engine:
    model, tokenizer = load_model(str(model_folder))
    return Engine(model, tokenizer, Plan.uniform("h2o", budget=16, buffer=8))


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[str | None]:
    return [result.text for result in engine.generate(PROMPTS, max_new_tokens=30).results()]


def test_stdout_is_only_the_text(
    kvpolicy: Shell, model_folder: Path, texts: list[str | None]
) -> None:
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O)
    assert answer.status == 0
    assert answer.out.removesuffix("\n") == texts[0]
    assert "budget 16 + 8" in answer.err
    assert "policies took" in answer.err


def test_the_share_of_a_full_cache_that_was_saved_is_printed(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O, "--json")
    result, run = answer.json_lines
    assert 0 < result["saved_share"] == 1 - result["peak_bytes"] / result["full_bytes"]
    assert run["saved_share"] == result["saved_share"]
    assert run["note"] is None
    shown = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O)
    assert f"{run['saved_share']:.1%}" in shown.err
    assert "nothing was evicted" not in shown.err


@pytest.mark.usefixtures("packs_small_products")
def test_packed_weights_are_counted_and_give_the_tokens_of_a_packed_engine(
    kvpolicy: Shell, model_folder: Path
) -> None:
    words = ("run", PROMPTS[0], "--model", model_folder, *H2O, "--cpu-weights")
    plain, packed = (kvpolicy(*words, order, "--json") for order in ("plain", "packed"))
    assert packed.status == 0, packed.err
    assert "packed" not in plain.err
    (_, without), (result, run) = plain.json_lines, packed.json_lines
    assert without["packed_bytes"] == without["released_bytes"] == 0
    assert run["packed_bytes"] >= run["released_bytes"] > 0
    assert "linear layers as 9 products: " in packed.err
    model, tokenizer = load_model(str(model_folder), cpu_weights="packed")
    engine = Engine(model, tokenizer, Plan.uniform("h2o", budget=16, buffer=8))
    (expected,) = engine.generate(PROMPTS[:1], max_new_tokens=30).results()
    assert result["tokens"] == list(expected.tokens)
    assert run["packed_bytes"] == engine.weights.packed_bytes
    assert run["released_bytes"] == engine.weights.released_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
def test_compiling_is_said_and_gives_the_same_text(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("run", PROMPTS[0], "--model", model_folder, *H2O)
    plain, compiled = kvpolicy(*words), kvpolicy(*words, "--compile")
    assert compiled.status == 0, compiled.err
    assert compiled.out == plain.out
    assert "s of them compiling: " in compiled.err
    assert "compiling" not in plain.err
    torch._dynamo.reset()
    report = kvpolicy(*words, "--compile", "--json").json_lines[-1]
    assert report["path"] == "static, compiled"
    assert 0 < report["compile_s"] < report["elapsed_s"]


def test_a_missing_compiler_is_answered_in_one_sentence(
    kvpolicy: Shell, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    refused = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O, "--compile")
    assert refused.status == 2
    assert "C++ compiler" in refused.err
    assert refused.out == ""


def test_a_small_model_stays_plain_and_says_so(
    kvpolicy: Shell, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.model.packed.MIN_BYTES", 2**19)
    words = ("run", PROMPTS[0], "--model", model_folder, *H2O, "--cpu-weights", "packed", "--json")
    found = kvpolicy(*words)
    assert found.json_lines[1]["packed_bytes"] == 0
    assert "packed" in found.err
    assert "less than 512.0 KiB" in found.err


def test_a_run_that_evicts_nothing_says_so(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("run", PROMPTS[0], "--model", model_folder, "--policy", "h2o", "--budget", 500)
    limit = ("--max-new-tokens", 5)
    shown = kvpolicy(*words, *limit)
    assert all(part in shown.err for part in ("500 + 62", "--budget"))
    assert "saved" not in shown.err
    note = kvpolicy(*words, *limit, "--json").json_lines[-1]["note"]
    assert "; try budget=" in note


def test_a_plan_file_equals_the_same_options(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, texts: list[str | None]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('budget = 99\nbuffer = 8\nstack = ["h2o"]\n', encoding="utf-8")
    words = ("--plan", path, "--budget", 16, "--max-new-tokens", 30)
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, *words)
    assert answer.out.removesuffix("\n") == texts[0]


def test_a_file_has_a_prompt_per_line(kvpolicy: Shell, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first line\n\n  second line\n", encoding="utf-8")
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O, "--json")
    assert [line["kind"] for line in answer.json_lines] == ["result", "result", "run"]


def test_prompts_and_results_as_json_lines(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, texts: list[str | None], engine: Engine
) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": "ignored"}) for prompt in PROMPTS]
    path.write_text("\n".join(lines), encoding="utf-8")
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O, "--json")
    *results, run = answer.json_lines
    assert {result["id"]: result["text"] for result in results} == dict(enumerate(texts))
    assert all(isinstance(result["tokens"], list) for result in results)
    assert run["kind"] == "run"
    assert run["num_requests"] == 3
    assert run["plan_digest"] == engine.plan.digest()
    assert run["new_tokens"] == sum(len(result["tokens"]) for result in results)


def test_results_of_a_file_have_unique_labels(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, texts: list[str | None]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p}) for p in PROMPTS), encoding="utf-8")
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O)
    for number, text in enumerate(texts):
        assert f"[{number}] " in answer.out
        assert str(text) in answer.out


@pytest.mark.parametrize("words", [("-",), ("--file", "-")])
def test_prompts_are_read_from_standard_input(
    kvpolicy: Shell,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    engine: Engine,
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b" tea is 3. What is tea?\n"))
    monkeypatch.setattr("sys.stdin", given)
    answer = kvpolicy("run", *words, "--model", model_folder, *H2O, "--json")
    (expected,) = engine.generate([" tea is 3. What is tea?"], max_new_tokens=30).results()
    assert answer.json_lines[0]["tokens"] == list(expected.tokens)


def test_token_ids_are_prompts(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, engine: Engine
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt": [9, 8, 7]}\n', encoding="utf-8")
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O, "--json")
    (expected,) = engine.generate([[9, 8, 7]], max_new_tokens=30).results()
    assert answer.json_lines[0]["tokens"] == list(expected.tokens)


def test_sampling_options_are_used(kvpolicy: Shell, model_folder: Path, engine: Engine) -> None:
    words = ("--temperature", 1.5, "--top-k", 20, "--top-p", 0.9, "--seed", 7, "--json")
    words += ("--min-p", 0.05, "--repetition-penalty", 1.3, "--min-new-tokens", 9)
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O, *words)
    how = Sampling(1.5, top_k=20, top_p=0.9, seed=7, min_p=0.05, repetition_penalty=1.3)
    (expected,) = engine.generate(
        [PROMPTS[0]], max_new_tokens=30, sampling=how, min_new_tokens=9
    ).results()
    assert answer.json_lines[0]["tokens"] == list(expected.tokens)


def test_a_stop_string_ends_the_text(
    kvpolicy: Shell, model_folder: Path, texts: list[str | None]
) -> None:
    words = str(texts[0]).split()
    stop = words[len(words) // 2]
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, *H2O, "--stop", stop)
    whole = str(texts[0])
    assert answer.out.removesuffix("\n") == whole[: whole.index(stop)]


def test_without_a_policy_no_row_is_evicted(kvpolicy: Shell, model_folder: Path) -> None:
    answer = kvpolicy("run", PROMPTS[0], "--model", model_folder, "--max-new-tokens", 5, "--json")
    assert answer.json_lines[0]["rows_evicted"] == 0
    assert "no policy was given" in answer.err


def test_one_bad_prompt_gives_an_error_result_and_exit_status_1(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, texts: list[str | None]
) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPTS[0]}, {"prompt": [10**6]}, {"prompt": PROMPTS[2]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O, "--json")
    assert answer.status == 1
    by_id = {line["id"]: line for line in answer.json_lines if line["kind"] == "result"}
    assert by_id[1]["finish_reason"] == "error"
    assert by_id[1]["error"]
    assert [by_id[0]["text"], by_id[2]["text"]] == [texts[0], texts[2]]
    plain = kvpolicy("run", "--file", path, "--model", model_folder, *H2O)
    assert plain.status == 1
    assert "prompt 1: " in plain.err


def test_a_single_bad_prompt_is_wrong_input(kvpolicy: Shell, model_folder: Path) -> None:
    answer = kvpolicy("run", "", "--model", model_folder, *H2O)
    assert answer.status == 2
    assert answer.out == ""
    assert "empty" in answer.err


@pytest.fixture(scope="module")
def chatty(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, which refuses a conversation that begins with an answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with user') }}"
        "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    )
    folder = tmp_path_factory.mktemp("chatty")
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_texts_are_put_into_the_chat_template_where_there_is_one(
    kvpolicy: Shell, chatty: Path, model_folder: Path
) -> None:
    def tokens(text: str, *words: object, model: Path = chatty) -> tuple[list[int], bool]:
        answer = kvpolicy("run", text, "--model", model, *H2O, "--json", *words)
        return answer.json_lines[0]["tokens"], "--raw" in answer.err

    by_hand = tokens("<|user|> tea is 3.<|assistant|>", "--raw")
    assert tokens(" tea is 3.") == (by_hand[0], True)
    assert tokens("<|user|> tea is 3.<|assistant|>") == by_hand, "nothing is wrapped twice"
    assert tokens(" tea is 3.", "--raw") == tokens(" tea is 3.", model=model_folder)
    with_system = tokens("<|system|>Be short.<|user|> tea is 3.<|assistant|>")
    assert tokens(" tea is 3.", "--system", "Be short.")[0] == with_system[0] != by_hand[0]


def test_trace_wraps_the_same_texts(kvpolicy: Shell, chatty: Path) -> None:
    words = ("trace", " tea is 3.", "--model", chatty, *H2O, "--hook", "score", "--json")
    wrapped, raw = kvpolicy(*words), kvpolicy(*words, "--raw")
    assert ("--raw" in wrapped.err, "--raw" in raw.err) == (True, False)


def test_a_system_message_that_no_prompt_gets_is_reported(kvpolicy: Shell, chatty: Path) -> None:
    words = ("run", "<|user|> tea<|assistant|>", "--model", chatty, *H2O, "--system", "Be short.")
    assert "--system" in kvpolicy(*words).err


def write_lines(folder: Path, *records: object) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_messages_are_put_into_the_chat_template_beside_prompts(
    kvpolicy: Shell, chatty: Path, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "Be short."}
    user = {"role": "user", "content": " tea is 3."}
    path = write_lines(
        tmp_path,
        {"messages": [system, user]},
        {"prompt": "<|system|>Be short.<|user|> tea is 3.<|assistant|>"},
        {"messages": [user]},
        {"prompt": " tea is 3."},
    )
    words = ("run", "--file", path, "--model", chatty, *H2O, "--json", "--in-order")
    tokens = [line["tokens"] for line in kvpolicy(*words).json_lines[:-1]]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    raw = [line["tokens"] for line in kvpolicy(*words, "--raw").json_lines[:-1]]
    assert raw[:3] == tokens[:3] != raw[3], "messages are a chat in any case"
    system = [line["tokens"] for line in kvpolicy(*words, "--system", "Be short.").json_lines[:-1]]
    assert system == [*tokens[:3], tokens[0]], "messages have what system message they say"


def test_an_empty_answer_says_why(kvpolicy: Shell, chatty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ends"
    shutil.copytree(chatty, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    others = [
        token for token in range(len(load_model(chatty)[1])) if token != config["eos_token_id"]
    ]
    path.write_text(json.dumps(config | {"suppress_tokens": others}), encoding="utf-8")
    answer = kvpolicy("run", " tea", "--model", folder, *H2O)
    assert answer.status == 0
    assert "--min-new-tokens" in answer.err
    write_lines(tmp_path, {"id": "a", "prompt": " tea"})
    of_file = kvpolicy("run", "--file", tmp_path / "lines.jsonl", "--model", folder, *H2O)
    assert "prompt a: " in of_file.err
    assert "--min-new-tokens" not in kvpolicy("run", " tea", "--model", chatty, *H2O).err


def test_ids_of_json_lines_name_the_results(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, texts: list[str | None]
) -> None:
    ids = ["first", 70, None]
    records = [{"id": one, "prompt": p} for one, p in zip(ids, PROMPTS, strict=True)]
    path = write_lines(tmp_path, *records, {"id": "bad\u001b[2J", "prompt": [10**6]})
    words = ("run", "--file", path, "--model", model_folder, *H2O)
    *results, _ = kvpolicy(*words, "--json").json_lines
    assert {one["id"]: one["text"] for one in results if one["text"]} == {
        "first": texts[0],
        70: texts[1],
        2: texts[2],
    }
    assert {one["index"]: one["id"] for one in results}[3] == "bad\u001b[2J"
    shown = kvpolicy(*words)
    for label, text in zip(("first", "70", "2"), texts, strict=True):
        assert f"[{label}] " in shown.out
        assert str(text) in shown.out
    assert "prompt bad\\u001b[2J: " in shown.err


def test_results_in_order_are_the_same_results(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    limits = [[5] * 40, [6] * 3, [7] * 20, [10**6], [8] * 2]
    path = write_lines(tmp_path, *({"prompt": ids} for ids in limits))
    limit = ("--max-new-tokens", 12, "--slots", 2)
    words = ("run", "--file", path, "--model", model_folder, *H2O, *limit, "--json")
    as_they_finish, in_order = kvpolicy(*words), kvpolicy(*words, "--in-order")
    assert (as_they_finish.status, in_order.status) == (1, 1)
    indices = [line["index"] for line in as_they_finish.json_lines[:-1]]
    assert indices != sorted(indices), "one of the prompts is refused before the others run"
    assert [line["index"] for line in in_order.json_lines[:-1]] == sorted(indices)
    tokens = {line["index"]: line["tokens"] for line in as_they_finish.json_lines[:-1]}
    assert {line["index"]: line["tokens"] for line in in_order.json_lines[:-1]} == tokens
    shown = kvpolicy(*words[:-1], "--in-order").out
    assert [line[:3] for line in shown.splitlines() if line.startswith("[")] == [
        "[0]",
        "[1]",
        "[2]",
        "[4]",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, KVPolicyError, None])
def test_a_result_comes_out_as_soon_as_those_before_it_are_out(
    error: type[BaseException] | None,
) -> None:
    seen: list[int] = []

    def run() -> Iterator[Result]:
        for number in (2, 0, 1, 4):
            yield Result(number)
            seen.append(-number)
        if error is not None:
            raise error
        yield Result(3)

    with nullcontext() if error is None else pytest.raises(error):
        for result in _in_order(run()):
            seen.append(result.id)
    rest = [-4, 4] if error else [-4, 3, 4]
    assert seen == [-2, 0, -0, 1, 2, -1, *rest], "what is held back is not lost"


def test_a_line_may_have_limits_and_sampling_of_its_own(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, engine: Engine, texts: list[str | None]
) -> None:
    whole = str(texts[1])
    stop = whole.split()[len(whole.split()) // 2]
    how = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 7}
    how |= {"min_p": 0.05, "repetition_penalty": 1.3}
    path = write_lines(
        tmp_path,
        {"prompt": PROMPTS[0], "max_new_tokens": 3},
        {"prompt": PROMPTS[1], "stop": stop, "seed": None},
        {"prompt": PROMPTS[2], **how},
        {"prompt": PROMPTS[2]},
    )
    words = ("run", "--prompts", path, "--model", model_folder, *H2O, "--json", "--in-order")
    few, stopped, sampled, plain, _ = kvpolicy(*words).json_lines
    assert len(few["tokens"]) == 3
    assert stopped["text"] == whole[: whole.index(stop)]
    sampling = Sampling(**how)
    (expected,) = engine.generate([PROMPTS[2]], max_new_tokens=30, sampling=sampling).results()
    assert sampled["tokens"] == list(expected.tokens)
    assert plain["text"] == texts[2]


def test_keys_that_are_not_used_are_named(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path, {"prompt": [9], "answer": 3}, {"prompt": [9], "source": 1, "id": 5}
    )
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O, "--json")
    assert answer.status == 0
    assert "'answer', 'source'" in answer.err


USER = {"role": "user", "content": "hi"}
ODD_LINES: dict[str, tuple[list[object], str]] = {
    "misspelt key": ([{"promt": "hi"}], "unknown key 'promt'; did you mean prompt?"),
    "empty object": ([{}], 'has no "prompt" and no "messages"; write one of them'),
    "both": ([{"prompt": "hi", "messages": [USER]}], 'a "prompt" and "messages"; write one'),
    "not an object": ([{"prompt": "hi"}, ["hi"]], "line 2 of "),
    "id of a list": ([{"id": [1], "prompt": "hi"}], "has the id [1]; write a text or a whole"),
    "id of truth": ([{"id": True, "prompt": "hi"}], "has the id True"),
    "id of a share": ([{"id": 1.5, "prompt": "hi"}], "has the id 1.5"),
    "same ids": ([{"id": "a", "prompt": "x"}] * 2, "and line 2 have the id 'a'"),
    "ids alike": ([{"id": "1", "prompt": "x"}, {"prompt": "x"}], "have the id 1"),
    "no messages": ([{"messages": []}], '"messages" is []; write [{"role"'),
    "messages of texts": ([{"messages": ["hi"]}], "has 'hi' as message 0"),
    "messages as text": ([{"messages": "hi"}], "\"messages\" is 'hi'"),
    "a message without role": ([{"messages": [{"content": "hi"}]}], "as message 0"),
    "a message of more": ([{"messages": [USER, USER | {"name": "a"}]}], "as message 1"),
    "content of parts": ([{"messages": [USER | {"content": [1]}]}], "no text as role or content"),
    "truths as tokens": ([{"prompt": [True]}], 'no "prompt" that is a text or a list of token'),
    "a temperature below 0": ([{"prompt": "x"}, {"prompt": "x", "temperature": -1}], "line 2 of "),
    "a share of tokens": ([{"prompt": "x", "max_new_tokens": 1.5}], "max_new_tokens=1.5; expected"),
    "an empty stop": ([{"prompt": "x", "stop": [""]}], "stop strings were given as ('',)"),
    "no template": ([{"prompt": "hi"}, {"messages": [USER]}], "line 2 of '{path}' has messages"),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", ODD_LINES)
def test_a_json_line_that_is_wrong_is_refused_in_one_sentence(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, name: str
) -> None:
    records, sentence = ODD_LINES[name]
    path = write_lines(tmp_path, *records)
    answer = kvpolicy("run", "--file", path, "--model", model_folder, *H2O)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert sentence.replace("{path}", str(path)) in answer.err


def test_a_template_that_refuses_the_messages_is_quoted(
    kvpolicy: Shell, chatty: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path, {"messages": [{"role": "assistant", "content": "hi"}]})
    answer = kvpolicy("run", "--file", path, "--model", chatty, *H2O)
    assert answer.status == 2
    assert "line 1 of " in answer.err
    assert "begin with user" in answer.err


def test_a_prompt_in_json_lines_may_contain_line_separators(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    (prompt,) = read_prompts(str(tmp_path / "a.jsonl"))
    assert prompt.content == "a\u2028b\x85c"


@pytest.mark.needs_reasoner
def test_without_a_prompt_a_problem_is_used_unless_a_prompt_may_have_been_piped(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert kvpolicy("run", "--max-new-tokens", 1).status == 0
    (tmp_path / "prompt.txt").write_text("1 + 1 = ?", encoding="utf-8")
    with open(tmp_path / "prompt.txt", encoding="utf-8") as redirected:
        monkeypatch.setattr("sys.stdin", redirected)
        assert kvpolicy("run", "--max-new-tokens", 1).status == 2
