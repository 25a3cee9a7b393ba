"""Question sets in the formats of the hub, with a few rows each."""

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# `openai/gsm8k`, config "main": calculator notes in angle brackets, the number after ####.
GSM8K = [
    {
        "question": "Ann has 3 bags of 4 apples. She eats 2. How many are left?",
        "answer": "She has 3*4=<<3*4=12>>12 apples.\nThen 12-2=<<12-2=10>>10 are left.\n#### 10",
    },
    {
        "question": "A house costs $1,200 and a barn $34. What do both cost?",
        "answer": "Both cost 1200+34=$<<1200+34=1234>>1234.\n#### 1,234",
    },
    {"question": "What is 5 times 5?", "answer": "5*5=<<5*5=25>>25\n#### 25"},
]

# `HuggingFaceH4/MATH-500`.
MATH_500 = [
    {
        "problem": "Convert $(0,3)$ to polar coordinates.",
        "solution": "We have $r = 3$ ... \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    {
        "problem": "What is one half of one?",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
]

# `Maxwell-Jia/AIME_2024`: capital letters, numbers as numbers, one split called train.
AIME_24 = [
    {"ID": "2024-II-4", "Problem": "Find $m+n$.", "Solution": "So 33.", "Answer": 33},
    {"ID": "2024-I-13", "Problem": "Find the least $p$.", "Solution": "110.", "Answer": 110},
]


def pack(tests: Sequence[Mapping[str, str]]) -> str:
    """The format of LiveCodeBench's private tests: base64 of zlib of a pickled JSON text."""
    text = json.dumps(tests).encode()
    pickled = b"\x80\x04X" + struct.pack("<I", len(text)) + text + b"\x94."
    return base64.b64encode(zlib.compress(pickled)).decode()


def _stdin(given: str, expected: str) -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": "stdin"}


def _call(given: str, expected: str) -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": "functional"}


# `livecodebench/code_generation_lite`, test.jsonl: columns contain JSON texts.
LIVECODEBENCH = [
    {
        "question_title": "Sum",
        "question_content": "Print the sum of the two numbers of each line.",
        "platform": "atcoder",
        "question_id": "abc001_a",
        "contest_id": "abc001",
        "contest_date": "2023-08-21T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([_stdin("1 2\n", "3\n")]),
        "private_test_cases": pack([_stdin("1 1\n2 2\n", "2\n4\n")]),
        "metadata": "{}",
    },
    {
        "question_title": "two-sum",
        "question_content": "Return the places of two numbers with the given sum.",
        "platform": "leetcode",
        "question_id": "2824",
        "contest_id": "weekly-1",
        "contest_date": "2023-09-01T00:00:00",
        "starter_code": "class Solution:\n    def twoSum(self, nums: List[int], s: int):\n        ",
        "difficulty": "medium",
        "public_test_cases": json.dumps([_call("[2, 7, 11]\n9", "[0, 1]")]),
        "private_test_cases": json.dumps([_call("[3, 3]\n6", "[0, 1]")]),
        "metadata": json.dumps({"func_name": "twoSum"}),
    },
]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_hub_folder(
    folder: Path, rows: Sequence[Mapping[str, Any]], *, split: str, config: str = "default"
) -> Path:
    """A data set like a clone of its hub repository: a card and Parquet files."""
    import datasets

    (folder / config).mkdir(parents=True)
    path_in_repo = f"{config}/{split}-00000-of-00001.parquet"
    datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(str(folder / path_in_repo))
    card = (
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
        f"  - split: {split}\n    path: {path_in_repo}\n---\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return folder
