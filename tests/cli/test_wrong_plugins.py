"""Errors in the policies of a plugin file: the command names the policy and exits."""

from pathlib import Path

import pytest
from shell import Shell, refusal

HEAD = """
import sys
import torch
from kvpolicy import hookimpl
"""
CLASS = HEAD + "\nclass Mine:\n"


def hook(signature: str, *lines: str) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f"{CLASS}    @hookimpl\n    def {signature}:\n{body}\n"


def score(*lines: str) -> str:
    return hook("score(self, keys, positions)", *lines)


def select(*lines: str) -> str:
    return hook("select(self, scores, budget)", *lines)


BEST = "best = scores.topk(budget, dim=2).indices.sort(dim=2).values"

#: The text of a plugin file, and what the error message about it contains.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    # files that do not give a policy
    "a syntax error": ("def (\n", ("cannot be run: SyntaxError",)),
    "a missing module": ("import nosuch\n", ("ModuleNotFoundError", "nosuch")),
    "an error on import": ("raise KeyError\n", ("cannot be run: KeyError",)),
    "an exit on import": ("import sys; sys.exit(3)\n", ("cannot be run: SystemExit: 3",)),
    "a NUL": ("x = '\0'\n", ("cannot be run",)),
    "no policy": ("class Mine: pass\n", ("holds no policy", "@kvpolicy.hookimpl")),
    "an unknown hook": (hook("scoer(self, keys)", "pass"), ("'mine'", "scoer")),
    "an unknown argument": (hook("score(self, key)", "pass"), ("'mine'", "key")),
    "compared by value": (
        CLASS
        + "    def __eq__(self, other):\n        return True\n"
        + "    @hookimpl\n    def score(self, keys):\n        pass\n",
        ("'mine' is compared by value", "eq=False"),
    ),
    "a knob without a default": (
        CLASS
        + "    def __init__(self, size):\n        pass\n"
        + "    @hookimpl\n    def score(self, keys):\n        pass\n",
        ("'mine' refuses its knobs", "size"),
    ),
    "an error when built": (
        CLASS
        + "    def __init__(self):\n        raise RuntimeError('no such file')\n"
        + "    @hookimpl\n    def score(self, keys):\n        pass\n",
        ("'mine' refuses its knobs: RuntimeError: no such file",),
    ),
    # errors in each hook
    "allocate raises": (hook("allocate(self, total)", "1 / 0"), ("ZeroDivision", "allocate()")),
    "schedule raises": (hook("schedule(self, waiting)", "1 / 0"), ("ZeroDivision", "schedule()")),
    "observe raises": (hook("observe(self, token_ids)", "1 / 0"), ("ZeroDivision", "observe()")),
    "steer raises": (hook("steer(self, hidden_states)", "1 / 0"), ("ZeroDivision", "steer()")),
    "due raises": (hook("due(self, num_rows)", "1 / 0"), ("ZeroDivision", "due() at layer 0")),
    "score raises": (score("1 / 0"), ("ZeroDivisionError", "score() at layer 0")),
    "select raises": (select("1 / 0"), ("ZeroDivisionError", "select() at layer 0")),
    "evict raises": (hook("evict(self, keep)", "1 / 0"), ("ZeroDivision", "evict() at layer 0")),
    "an error without a message": (score("raise IndexError"), ("IndexError", "score()")),
    "an error of many lines": (score("raise ValueError('a\\nb\\nc')"), ("a b c",)),
    "an exit in a hook": (score("sys.exit(0)"), ("SystemExit", "score() at layer 0")),
    "a wrapper that does not yield": (
        f"{CLASS}    @hookimpl(wrapper=True)\n    def score(self, keys):\n        return 3\n",
        ("'mine'", "score"),
    ),
    "endless recursion": (
        f"{CLASS}    def more(self):\n        return self.more()\n"
        "    @hookimpl\n    def score(self, keys):\n        return self.more()\n",
        ("'mine'", "RecursionError", "score()"),
    ),
    # scores
    "scores of one row too few": (
        score("return -keys.norm(dim=-1)[:, :, 1:]"),
        ("[1, 2, 19]", "[1, 2, 20]"),
    ),
    "scores without heads": (
        score("return -keys.norm(dim=-1)[:, 0]"),
        ("[1, 20]", "[1, 2, 20]"),
    ),
    "scores of integers": (score("return positions"), ("int64", "floating point")),
    "scores of complex numbers": (score("return positions * 1j"), ("complex64", "floating")),
    "scores on another device": (
        score("return positions.float().to('meta')"),
        ("meta", "cpu", "score()"),
    ),
    "scores that are sparse": (
        score("return positions.float().to_sparse()"),
        ("sparse_coo", "score()"),
    ),
    "scores with NaN": (
        score("return positions.float().masked_fill(positions == 2, torch.nan)"),
        ("NaN", "score()"),
    ),
    "scores that are a list": (
        score("return positions.tolist()"),
        ("list", "score()"),
    ),
    "wrong once, then an error": (
        HEAD + "calls = []\nclass Mine:\n    @hookimpl\n    def score(self, keys):\n"
        "        calls.append(1)\n"
        "        return 3 if len(calls) == 1 else 1 / 0\n",
        ("'mine'", "score()"),
    ),
    # rows
    "rows unsorted": (select(BEST, "return best.flip(2)"), ("select()", "increasing")),
    "rows twice": (
        select(BEST, "best[..., 1] = best[..., 0]", "return best"),
        ("select()", "duplicates"),
    ),
    "rows beyond the end": (
        select(BEST, "return best + 99"),
        ("99 to 118", "0 to 19"),
    ),
    "rows below 0": (select(BEST, "return best - 99"), ("-99 to -80", "0 to 19")),
    "too many rows": (
        select("return torch.arange(scores.shape[2]).expand(scores.shape)"),
        ("16", "select()"),
    ),
    "no rows": (select(BEST, "return best[:, :, :0]"), ("0 rows", "select()")),
    "rows of floats": (select(BEST, "return best.float()"), ("float32", "select()")),
    "rows on another device": (
        select(BEST, "return best.to('meta')"),
        ("meta", "cpu", "select()"),
    ),
    "rows as a mask": (select("return scores > 0"), ("torch.bool", "torch.int64")),
    # the other hooks
    "allocate one row more": (
        hook(
            "allocate(self, layer_indices, budget)", "return [17, *([16] * len(layer_indices))][:2]"
        ),
        ("'mine'", "33", "32", "allocate()"),
    ),
    "due as numbers": (hook("due(self, num_rows)", "return num_rows"), ("bool", "due()")),
    "due on another device": (
        hook("due(self, num_rows)", "return (num_rows > 0).to('meta')"),
        ("meta", "cpu", "due()"),
    ),
    "steer in another dtype": (
        hook("steer(self, hidden_states)", "return hidden_states.double()"),
        ("float64", "float32", "steer()"),
    ),
    "steer of another shape": (
        hook("steer(self, hidden_states)", "return hidden_states[:, 1:]"),
        ("[1, 32]", "steer()"),
    ),
    "steer on another device": (
        hook("steer(self, hidden_states)", "return hidden_states.to('meta')"),
        ("meta", "cpu", "steer()"),
    ),
    "observe returns a value": (
        hook("observe(self, token_ids)", "return token_ids"),
        ("observe()",),
    ),
    "evict returns a number": (
        hook("evict(self, keep)", "return 3"),
        ("3", "evict()"),
    ),
    "evict without keeping": (hook("evict(self, keep)", "return True"), ("rows.keep()",)),
    "schedule nothing": (hook("schedule(self, waiting)", "return []"), ("schedule()",)),
    "schedule texts": (
        hook("schedule(self, waiting)", "return [['a']]"),
        ("'a'", "schedule()"),
    ),
    "schedule lists of lists of lists": (
        hook("schedule(self, waiting)", "return [[[0]]]"),
        ("[0]", "schedule()"),
    ),
}
RUN = ("--budget", "16", "--buffer", "4", "--max-new-tokens", "24", "--json")


@pytest.mark.few(4)
@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_the_message_names_the_failing_policy(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, text: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7, 8, 9]}\n')
    if "schedule" in text:
        plan = 'stack = ["full"]\nschedule = ["mine"]\n'
    else:
        # The full cache never compacts; without a policy below, the newest rows stay.
        plan = 'stack = ["streaming", "mine"]\n'
    (tmp_path / "plan.toml").write_text(plan)
    files = ("--plan", tmp_path / "plan.toml", "--file", tmp_path / "ids.jsonl")
    words = ("run", "--plugin", tmp_path / "mine.py", *files, *RUN, "--model", model_folder)
    sentence = refusal(kvpolicy(*words))
    assert "mine" in sentence
    for part in expected:
        assert part in sentence


def test_the_same_options_work_with_a_correct_policy(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(score("return -keys.norm(dim=-1)"))
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7, 8, 9]}\n')
    words = ("--policy", "mine", "--file", tmp_path / "ids.jsonl", *RUN, "--model", model_folder)
    answer = kvpolicy("run", "--plugin", tmp_path / "mine.py", *words)
    assert answer.status == 0, answer.err
    assert answer.json_lines[0]["compactions"] > 0


@pytest.mark.parametrize("file", ["mine.py", "dir.py", "mine.txt"])
def test_a_plugin_that_is_no_python_file_is_refused(
    kvpolicy: Shell, tmp_path: Path, file: str
) -> None:
    (tmp_path / "dir.py").mkdir()
    (tmp_path / "mine.txt").write_text(score("return keys.norm(dim=-1)"))
    sentence = refusal(kvpolicy("list", "--plugin", tmp_path / file))
    assert str(tmp_path / file) in sentence


@pytest.mark.needs_reasoner
def test_a_file_that_fails_registers_no_policy(kvpolicy: Shell, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(score("return -keys.norm(dim=-1)") + "\n1 / 0\n")
    refusal(kvpolicy("list", "--plugin", path))
    assert "'mine'" in refusal(kvpolicy("run", "a", "--policy", "mine"))
