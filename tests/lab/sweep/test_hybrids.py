"""A sweep over a hybrid model: layers without rows are in its plans, and in nothing kept."""

import json
from pathlib import Path

import pytest
from families import model_of
from hybrids import HYBRIDS
from shell import Shell

from kvpolicy.compat import has_states

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_reasoner,
    pytest.mark.skipif(not has_states(), reason="transformers has no cache for states"),
]


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    """A model whose layers 1 and 3 have attention, with the tokenizer of the reasoner."""
    from kvpolicy_reasoner.tokenizer import build_tokenizer  # not installed everywhere

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    sizes = {"num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    model = model_of("lfm2", **HYBRIDS["lfm2"], **sizes, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_policies_are_compared_and_kept_rows_are_those_of_layers_with_attention(
    kvpolicy: Shell, hybrid: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    words = ("ablate", "--model", hybrid, "--policies", "full,h2o,streaming,snapkv")
    words += ("--budgets", "12,20", "--buffer", 6, "--n", 1, "--max-new-tokens", 8)
    words += ("--set", "h2o.n_recent=3", "--set", "snapkv.window_size=4", "--workers", 1)
    words += ("--task", "reasoner", "--task", "retention:of=reasoner", "--output", folder)
    answer = kvpolicy(*words)
    assert answer.status == 0, answer.err
    table = json.loads((folder / "table.json").read_text("utf-8"))
    assert [(row["task"], row["series"], row["budget"]) for row in table] == [
        (task, series, budget)
        for task in ("reasoner", "retention:of=reasoner")
        for series, budget in [
            ("full", None),
            *((name, num) for name in ("h2o", "streaming", "snapkv") for num in (12, 20)),
        ]
    ]
    held = {(row["series"], row["budget"]): row["retained_attention"]["value"] for row in table[7:]}
    assert held["full", None] == 1
    for name in ("h2o", "streaming", "snapkv"):
        assert 1 > held[name, 20] > held[name, 12] > 0
    kept = [json.loads(line) for line in (folder / "kept.jsonl").read_text("utf-8").splitlines()]
    assert len(kept) == len(table)
    for one in kept:
        assert [layer["layer"] for layer in one["layers"]] == [1, 3]
        assert [len(layer["left_at"]) for layer in one["layers"]] == [2, 2]
    assert kvpolicy("report", folder, "--output", tmp_path / "report.html").status == 0
