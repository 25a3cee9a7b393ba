"""Where several processes share a model, each has a store for the rows of its own heads."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.needs_reasoner]


@pytest.mark.nightly
def test_ranks_reuse_the_same_prompts(tmp_path: Path) -> None:
    import reuse_on_ranks
    from tensor_parallel_runs import save_models, start

    save_models(tmp_path)
    done = start(tmp_path, Path(reuse_on_ranks.__file__))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"reuse-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for round_ in first["found"]:
        assert [tokens for tokens, _ in round_] == first["plain"]
    assert [reused for _, reused in first["found"][1]] == [20] * 6
    assert first["stats"]["evictions"] > 0
    assert first["refusal"].endswith("each of which has rows of its own heads; leave out spill")
