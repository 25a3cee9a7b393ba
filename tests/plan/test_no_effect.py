"""What is said to change nothing changes nothing, and what changes something is not said to."""

from typing import Any

import pytest
from tiny import shared_model

from kvpolicy import Engine, Plan
from kvpolicy.plan.no_effect import without_effect

NUM_LAYERS = 2
PROMPTS = [[7, 3, 9, 1] * 6, [5, 8] * 20]
SHARED = {"heads": "shared"}


def tokens(stack: list[Any], budget: int | None = 12, **entries: Any) -> list[tuple[int, ...]]:
    plan = Plan.from_dict({"stack": stack, "budget": budget, "buffer": 4, **entries})
    engine = Engine(shared_model(num_layers=NUM_LAYERS), None, plan)
    return [
        tuple(result.tokens) for result in engine.generate(PROMPTS, max_new_tokens=20).results()
    ]


def said(stack: list[Any], budget: int = 12, **entries: Any) -> list[str]:
    plan = Plan.from_dict({"stack": stack, "budget": budget, **entries})
    return without_effect(plan.resolve(NUM_LAYERS))


def pyramids(*betas: int) -> list[dict[str, Any]]:
    return [{"policy": "pyramidkv", "window_size": 4, "beta": beta} for beta in betas]


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("idle", "stack", "entries", "without", "entries_without"),
    [
        ("adakv", ["h2o", "adakv"], {}, ["h2o"], {}),
        (
            "adakv",
            ["h2o", {"policy": "adakv", "alpha_safeguard": 1}],
            SHARED,
            ["h2o"],
            {},
        ),
        ("layer_sensitivity", ["layer_sensitivity", "h2o"], {}, ["h2o"], {}),
        ("protect", ["h2o", {"policy": "protect", "n_sink": 0, "n_recent": 0}], {}, ["h2o"], {}),
        ("protect", ["full", "protect"], {}, ["full"], {}),
        ("merge", ["full", "merge"], {}, ["full"], {}),
        ("heads", ["h2o"], SHARED, ["h2o"], {}),
        (
            "score() of policy 'knorm'",
            [{"policy": "knorm", "n_recent": 0}, "random"],
            {},
            ["random"],
            {},
        ),
        ("due() of policy 'h2o'", [{"policy": "h2o", "every": 2}, "full"], {}, ["h2o", "full"], {}),
        (
            "allocate() of policy 'pyramidkv' in 'mix'",
            [{"policy": "mix", "of": pyramids(2, 9)}],
            {},
            [{"policy": "mix", "of": pyramids(2, 2)}],
            {},
        ),
    ],
)
def test_what_is_said_to_change_nothing_changes_no_token(
    idle: str,
    stack: list[Any],
    entries: dict[str, Any],
    without: list[Any],
    entries_without: dict[str, Any],
) -> None:
    (sentence,) = said(stack, **entries)
    assert idle in sentence
    assert "layers 0 to 1" in sentence
    assert tokens(stack, **entries) == tokens(without, **entries_without)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stack", "entries", "without"),
    [
        (["h2o", "adakv"], SHARED, ["h2o"]),
        (["h2o", "protect"], {}, ["h2o"]),
        (["h2o", "merge"], {}, ["h2o"]),
        (
            [{"policy": "mix", "of": pyramids(2)}],
            {},
            [{"policy": "mix", "of": pyramids(1)}],
        ),
    ],
)
def test_what_changes_tokens_is_not_said_to_change_nothing(
    stack: list[Any], entries: dict[str, Any], without: list[Any]
) -> None:
    assert said(stack, **entries) == []
    assert tokens(stack, **entries) != tokens(without)


def test_gates_that_nobody_trained_are_told() -> None:
    (sentence,) = said(["trimkv"])
    assert "trimkv" in sentence
    assert said([{"policy": "trimkv", "gates": "reasoner"}]) == []


def test_only_layers_in_which_it_changes_nothing_are_named() -> None:
    plan = Plan.from_dict(
        {
            "stack": ["h2o", "adakv"],
            "budget": 12,
            "layers": [{"where": "0:2", "heads": "shared"}, {"where": "2:"}],
        }
    )
    (sentence,) = without_effect(plan.resolve(5))
    assert "layers 2 to 4" in sentence
