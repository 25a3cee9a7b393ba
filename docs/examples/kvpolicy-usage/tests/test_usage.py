"""What the policies do, from outside: in an engine, in another engine's place, and cut in two."""

from pathlib import Path

import pytest
import torch
from kvpolicy_usage import LastUsed, Question

from kvpolicy import CacheView, Engine, Plan, Request, SequenceSnapshot, load_model, select_rows

PLANS = ["usage", Path(__file__).parents[1] / "answers.toml"]
PROMPT = "12+7*3=" * 20


@pytest.fixture(scope="module")
def engine_of():
    model, tokenizer = load_model("reasoner")
    return lambda plan: Engine(model, tokenizer, plan)


def test_another_engine_gets_the_same_decision_from_tensors_alone() -> None:
    positions = torch.arange(12).expand(1, 2, -1)
    weights = torch.zeros(1, 2, 1, 12)
    weights[0, 0, 0, 3], weights[0, 1, 0, 5] = 0.9, 0.9  # the newest query uses these rows
    rows = CacheView(positions=positions, attn_weights=weights, prompt_len=torch.tensor([8]))
    selection = select_rows([LastUsed(), Question(size=2)], rows, budget=4)
    assert selection.keep.tolist() == [[[3, 6, 7, 11], [5, 6, 7, 11]]]


def test_a_prompt_stays_and_the_answer_is_compacted(engine_of) -> None:
    engine = engine_of(Plan.load(PLANS[1]))
    (result,) = engine.generate([PROMPT], max_new_tokens=120, stop_ids=()).results()
    assert result.peak_rows == result.prompt_len + 32 + 8
    assert result.rows_evicted > 0


@pytest.mark.parametrize("plan", PLANS, ids=["usage", "answers"])
def test_a_sequence_goes_on_from_a_file_as_if_it_had_not_been_cut(
    plan: str | Path, engine_of, tmp_path: Path
) -> None:
    engine = engine_of(Plan.load(plan))

    def serve(request: Request):
        (result,) = engine.generate([request]).results()
        return result

    whole = serve(Request(PROMPT, 100, stop_ids=()))
    half = serve(Request(PROMPT, 60, stop_ids=(), snapshot=True))
    half.snapshot.save(tmp_path / "half.safetensors")
    snapshot = SequenceSnapshot.load(tmp_path / "half.safetensors")
    rest = serve(Request([], 40, stop_ids=(), resume=snapshot))
    assert rest.tokens[-40:] == whole.tokens[60:]
