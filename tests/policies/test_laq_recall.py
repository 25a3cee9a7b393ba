"""The recall of look-aheads, `docs/benchmarks/laq_recall.py`."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import load_script

from kvpolicy import Engine, Plan, load_model

pytestmark = pytest.mark.needs_reasoner


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/laq_recall.py")


@pytest.mark.nightly
def test_figures_are_the_same_in_every_run_and_a_look_ahead_sees_more(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--texts", "2", "--models", "reasoner", "--tasks", "multikey", "--budgets", "32"]
    for name in ("one", "other"):
        script.main([*options, "--json", str(tmp_path / name)])
    assert (tmp_path / "one").read_text() == (tmp_path / "other").read_text()
    ((found,),) = (json.loads((tmp_path / "one").read_text()),)
    means = {name: by_budget["32"][0] for name, by_budget in found["recall"].items()}
    assert means["LAQ"] > max(mean for name, mean in means.items() if "SnapKV, window" in name)
    assert f"| LAQ | {means['LAQ']:.3f}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(script: ModuleType) -> tuple[Any, Any, dict[int, Any]]:
    """A model, a text, and what each layer computes for it."""
    model, tokenizer = load_model("reasoner")
    engine = Engine(model, tokenizer, Plan.uniform("full", budget=64), slots=1)
    (text,) = script.read(engine, "multikey", 1, 0)
    num = len(text.tokens)
    records = script.Records(num, num)
    layers = script.recorded(model, text.tokens, ["streaming"], records, budget=8, tokens=2)
    return model, text, layers


def test_recorded_queries_and_weights_are_those_of_the_model(recorded: Any) -> None:
    model, text, layers = recorded
    num = len(text.tokens)
    assert len(layers) == model.config.num_hidden_layers
    for keys, values, queries, weights in layers.values():
        assert keys.shape == values.shape
        assert queries.shape[1] == weights.shape[1] == weights.shape[2] == num
        logits = queries @ keys.repeat_interleave(len(queries) // len(keys), dim=0).mT
        logits *= keys.shape[2] ** -0.5
        later = torch.ones(num, num, dtype=torch.bool).triu(1)
        expected = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
        torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)


def test_tokens_decoded_over_all_rows_are_those_of_the_text(
    script: ModuleType, recorded: Any
) -> None:
    model, text, layers = recorded
    for layer, found in script.pseudo_queries(model, text, text.at).items():
        true = layers[layer][2][:, text.at : text.at + script.LOOKAHEAD]
        torch.testing.assert_close(found, true, rtol=1e-3, atol=1e-3)
