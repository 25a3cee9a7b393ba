"""The pure parts of `.ci/gpu`: what is compared, and how stages end."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpolicy import installed_policies

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".ci" / "gpu_checks"
if not FOLDER.is_dir():
    pytest.skip(
        "the sources are not here: these tests run against a wheel", allow_module_level=True
    )


@pytest.fixture(autouse=True, scope="module")
def _scripts_are_importable() -> Iterator[None]:
    numba = sys.modules.get("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield
    # Stages do without Numba; tests that follow do not.
    sys.modules.pop("numba", None)
    if numba is not None:
        sys.modules["numba"] = numba


# Texts


def text(tokens: list[int], rows: dict) -> object:
    from texts import Text

    return Text(tokens, rows)


def rows(*positions: int) -> list:
    """One layer with one head."""
    return [[list(positions)]]


def expected() -> dict:
    """A text as it comes out of a JSON file."""
    whole = text([7, 8, 9, 7], {1: rows(0, 1), 3: rows(0, 2)})
    return json.loads(json.dumps(whole.to_dict()))


def test_the_first_difference_of_a_text_is_found() -> None:
    from texts import Parting, parting

    seen = {1: rows(0, 1), 3: rows(0, 2)}
    assert parting(expected(), text([7, 8, 9, 7], seen)) is None
    assert parting(expected(), text([7, 8, 9, 6], seen)) == Parting("token", 3, 3)
    assert parting(expected(), text([7, 8, 9], seen)) == Parting("length", 3, 3)
    assert parting(expected(), text([7, 8, 9, 7, 1], seen)) == Parting("length", 4, 3)
    # Rows after n tokens come before token n, and after token n - 1.
    other = seen | {3: rows(1, 2)}
    assert parting(expected(), text([7, 8, 9, 6], other)) == Parting("rows", 3, 1)
    assert parting(expected(), text([7, 5, 9, 7], other)) == Parting("token", 1, 1)
    # Rows that one side only has seen are not compared.
    assert parting(expected(), text([7, 8, 9, 7], {2: rows(5)})) is None


def test_disputed_rows_are_a_tie_only_if_their_own_scores_are_near() -> None:
    from texts import rows_gap

    scores, positions = [[0.5, 0.500001, 4.0, float("inf")]], [[0, 1, 2, 3]]
    assert rows_gap(scores, positions, [[0, 2, 3]], [[1, 2, 3]]) == pytest.approx(2.5e-7, rel=0.1)
    assert rows_gap(scores, positions, [[0, 2, 3]], [[0, 1, 3]]) > 0.8
    assert rows_gap(scores, positions, [[0, 3]], [[0, 1]]) == float("inf")  # it must stay
    assert rows_gap(scores, positions, [[0]], [[9]]) == float("inf")  # nobody has scored it


def test_heads_that_share_a_budget_dispute_together() -> None:
    from texts import rows_gap

    scores, positions = [[1.0, 2.0], [2.00001, 5.0]], [[0, 1], [0, 1]]
    ours, theirs = [[0, 1], [1]], [[0], [0, 1]]
    assert rows_gap(scores, positions, ours, theirs) == pytest.approx(2e-6, rel=0.1)
    assert rows_gap([[1.0, 4.0], [2.0, 5.0]], positions, ours, theirs) == pytest.approx(0.4)


def test_a_text_is_excused_by_the_compaction_in_which_it_parts_and_by_no_other() -> None:
    from decoding import Replay
    from ties import ROWS_TOLERANCE, gap_at

    from kvpolicy import Sampling

    replay = Replay(
        rows={9: rows(0, 3)},
        compactions=[
            (5, 0, [[0, 1, 2]], [[9.0, 8.0, 1.0]]),
            (9, 0, [[0, 1, 3]], [[9.0, 5.0, 5.000001]]),
        ],
    )

    def gap(found: object, before: int) -> float:
        from texts import Parting

        given = text([1] * 9, {9: found})
        parting = Parting("rows", 9, before)
        return gap_at(parting, given.to_dict(), given, replay, Sampling(), 4)[0]

    assert gap(rows(0, 1), before=5) < ROWS_TOLERANCE
    assert gap(rows(1, 3), before=5) > 0.4
    assert gap(rows(0, 1), before=9) == float("inf")  # nothing was compacted since
    assert gap(rows(0, 3), before=5) == 0  # the CPU of that machine finds the same
    assert gap(rows(0, 2), before=5) == float("inf")  # nobody has scored it


def test_rows_are_excused_by_noise_that_moves_them_and_by_no_other() -> None:
    from decoding import Replay
    from texts import Parting
    from ties import noise_moves_as_much

    def replay(scores: list[float], *held: int, positions: tuple = (0, 1, 3)) -> Replay:
        return Replay(rows={9: rows(*held)}, compactions=[(9, 0, [list(positions)], [scores])])

    parting, card = Parting("rows", 9, 5), text([1] * 9, {9: rows(0, 1)})
    plain = replay([9.0, 5.0, 6.0], 0, 3)

    def is_excused(*noisy: Replay) -> bool:
        return noise_moves_as_much(parting, card, plain, noisy)

    assert is_excused(replay([9.0, 5.0, 6.0], 0, 3), replay([9.0, 6.1, 6.0], 0, 1)), "the card's"
    assert is_excused(replay([9.0, 5.0, 6.5], 0, 3)), "by half of what lies between"
    assert not is_excused(replay([9.0, 5.0, 6.4], 0, 3))
    assert not is_excused(replay([2.0, 5.0, 6.0], 0, 3)), "another row is not in question"
    assert not is_excused(replay([9.0, 5.0, 8.0], 0, 3, positions=(0, 2, 3))), "other rows"
    assert not is_excused()
    unknown = Replay(rows=plain.rows, compactions=[(9, 0, [[0, 3]], [[9.0, 6.0]])])
    assert not noise_moves_as_much(parting, card, unknown, [replay([0.0, 0.0, 0.0], 0, 3)])


def test_a_replay_holds_the_rows_that_are_known() -> None:
    """So that what it decides by is of the rows that were held, whatever it would have kept."""
    from decoding import replayed
    from tiny import tiny_model

    from kvpolicy import Plan

    def plan_with(watcher: object) -> Plan:
        return Plan.uniform("knorm", watcher, budget=12, buffer=4)

    prompt, tokens = [1, 2, 3, 4], list(range(5, 25))
    plain = replayed(tiny_model(), None, plan_with, prompt, tokens)
    first = plain.compactions[0][0]
    oldest = [[list(range(12)) for _ in layer] for layer in plain.rows[first]]
    forced = replayed(tiny_model(), None, plan_with, prompt, tokens, {first: oldest})
    assert [[head[:12] for head in layer] for layer in forced.rows[first]] == oldest
    assert plain.rows[first] != forced.rows[first]
    again = replayed(tiny_model(), None, plan_with, prompt, tokens, plain.rows)
    assert again.rows == plain.rows


def test_a_greedy_token_is_excused_by_its_logit_only() -> None:
    import torch
    from decoding import Replay
    from texts import Parting
    from ties import TOKEN_TOLERANCE, gap_at

    from kvpolicy import Sampling

    replay = Replay(logits=[torch.tensor([0.0, 4.0, 3.9999])])

    def gap(token: int, kind: str = "token") -> float:
        parting, wanted = Parting(kind, 0), text([1], {}).to_dict()
        return gap_at(parting, wanted, text([token], {}), replay, Sampling(), 4)[0]

    assert 0 < gap(2) < TOKEN_TOLERANCE
    assert gap(0) == 4
    assert gap(1, "length") == float("inf")


def test_the_gap_of_a_draw_is_what_its_share_would_have_to_move() -> None:
    from texts import share_gap

    weights = [1, 2, 1]  # of the shares 0 to 0.25, to 0.75, to 1
    assert share_gap(weights, 0.3, 1) == 0
    assert share_gap(weights, 0.26, 0) == pytest.approx(0.01)
    assert share_gap(weights, 0.26, 2) == pytest.approx(0.49)


def test_one_token_moves_a_mean_deviation_by_one_nat_at_most() -> None:
    from texts import deviation

    assert deviation([[-1.0, -2.0], [-3.0]], [[-1.1, -2.0], [-3.2]]) == pytest.approx(0.1)
    assert deviation([[-1.0, -50.0]], [[-1.0, -2.0]]) == 0.5


def test_all_installed_policies_are_compared() -> None:
    from workload import QUICK_STACKS, STACKS

    named = json.dumps(STACKS)
    others = {"protect", "protect_images", "mix"}
    ours = [one.name for one in installed_policies() if one.name not in others]
    assert [name for name in ours if f'"{name}"' not in named] == []
    assert set(QUICK_STACKS) <= set(STACKS)


# Stages

SCRIPTS = {
    "versions": "print('first line')",
    "tests": "raise SystemExit(3)",
    "tokens": "import time; print('begun', flush=True); time.sleep(600)",
    "bench": "import sys; print(sys.argv[2:])",
}


@pytest.mark.nightly
def test_a_stage_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from stages import Run, run_stages, summary

    for name, script in SCRIPTS.items():
        (tmp_path / f"stage_{name}.py").write_text(script)
    out = tmp_path / "out"
    out.mkdir()
    run = Run(out=out, device="cpu", quick=True, environment={}, folder=tmp_path)
    outcomes = run_stages(list(SCRIPTS), run, dict.fromkeys(SCRIPTS, 60) | {"tokens": 3})
    assert [one.status for one in outcomes] == [0, 3, None, 0]
    assert [one.passed for one in outcomes] == [True, False, False, True]
    printed = capsys.readouterr().out
    assert "first line" in printed
    assert "begun" in printed
    assert "['cpu', '--quick']" in printed
    assert "FAILED: tests, tokens" in summary(outcomes)
    assert "FAILED" not in summary([outcomes[0], outcomes[3]])
    assert "FAILED: tests, tokens" in (out / "gpu.log").read_text()
    assert [one["status"] for one in json.loads((out / "summary.json").read_text())] == [
        0,
        3,
        None,
        0,
    ]
    assert sorted(file.name for file in out.iterdir()) == ["gpu.log", "summary.json"]


def test_findings_are_in_the_file_of_a_stage_as_soon_as_they_are_known(tmp_path: Path) -> None:
    from stage_report import Report

    report = Report("tokens", tmp_path, "cpu", quick=True)
    report.note("h2o", {"equal": 12})
    assert json.loads((tmp_path / "tokens.json").read_text())["h2o"] == {"equal": 12}
    report.fail("snapkv: text 3")
    assert json.loads((tmp_path / "tokens.json").read_text())["failures"] == ["snapkv: text 3"]


def test_failed_tests_are_read_from_their_file(tmp_path: Path) -> None:
    from stage_tests import results_of

    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="test_1"/>'
        '<testcase classname="a" name="test_2"><failure message="1 == 2&#10;more"/></testcase>'
        '<testcase classname="a" name="test_3"><skipped/></testcase>'
        '<testcase classname="a" name="test_4"><error message="gone"/></testcase>'
        "</testsuite></testsuites>"
    )
    counts, failures = results_of(file)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failures == ["a::test_2: 1 == 2", "a::test_4: gone"]


def test_tests_that_take_a_device_are_found() -> None:
    from stage_tests import ALL_OF, QUICK_OF, tests_on_a_device

    found = set(tests_on_a_device(ROOT))
    assert "tests/engine/test_on_device.py::test_full_cache_equals_generate" in found
    assert {name.split("/")[1] for name in found} == {"cache", "hooks", "engine"}
    assert all((ROOT / name).exists() for name in (*ALL_OF, *QUICK_OF))


def test_what_failed_and_what_was_not_profiled_fails_the_stage() -> None:
    from stage_bench import problems_in

    found = {
        "missing": [
            {"job": ["h2o", "batch 1"], "reason": "4 s expected, 2 s left", "failed": False},
            {"job": ["h2o", "batch 8"], "reason": "RuntimeError: no kernel", "failed": True},
        ],
        "standings": [
            {"name": "full", "work": "batch 1", "profile": {"problem": ""}},
            {"name": "rkv", "work": "batch 1", "profile": {"problem": "saw nothing"}},
            {"name": "vLLM", "work": "batch 1", "profile": None},
        ],
    }
    first, second = problems_in(found)
    assert "h2o, batch 8" in first
    assert "rkv, batch 1" in second


def test_all_stages_fit_into_ten_minutes() -> None:
    from stages import FOLDER, STAGES

    assert sum(STAGES.values()) < 600
    assert all((FOLDER / f"stage_{name}.py").exists() for name in STAGES)


def test_another_source_needs_another_preparation(tmp_path: Path) -> None:
    from prepare import digest_of_sources, prepared_for

    assert prepared_for(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text(
        '[tool.hatch.build.targets.wheel]\npackages = ["package"]\n'
    )
    (tmp_path / "package").mkdir()
    source = tmp_path / "package" / "module.py"
    source.write_text("one = 1\n")
    before = digest_of_sources(tmp_path)
    (tmp_path / "package" / "__pycache__").mkdir()
    (tmp_path / "package" / "__pycache__" / "module.pyc").write_bytes(b"1")
    assert digest_of_sources(tmp_path) == before
    source.write_text("one = 2\n")
    assert digest_of_sources(tmp_path) != before


def test_weights_that_no_stage_loads_are_not_carried_along() -> None:
    from prepare import LEFT_OUT, is_carried

    files = ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(is_carried(f"kvpolicy_reasoner/weights/reasoner/{file}") for file in files)
    assert not is_carried("kvpolicy_reasoner/weights/smollm2-reasoner/tokenizer.json")
    assert all((ROOT / "plugins" / folder).is_dir() for folder in LEFT_OUT), "they exist"


def test_python_files_of_the_command_shadow_no_module_of_python() -> None:
    """They are imported by their bare names, from a folder that comes first."""
    names = {file.stem for file in FOLDER.glob("*.py")}
    assert names & sys.stdlib_module_names == set()
