"""Budgets given as a share of a length."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import Plan
from kvpolicy.errors import BudgetError, PlanError
from kvpolicy.plan.spec import LayerGroup


def resolved_budgets(plan: Plan, num_layers: int = 4) -> list[int | None]:
    return [layer.budget for layer in plan.resolve(num_layers).layers]


@pytest.mark.parametrize(
    ("share", "length", "rows"),
    [
        ("25%", 2048, 512),
        ("100%", 64, 64),
        ("12.5%", 800, 100),
        ("33%", 100, 33),
        ("33.3%", 1000, 333),
        ("33.3%", 100, 33),  # never more than the share
        ("0.1%", 32_768, 32),
        ("70%", 10, 7),  # 0.7 * 10 is 7.000000000000001 or 6.999999999999999 in floats
        ("57%", 100, 57),  # 0.57 * 100 is 56.99999999999999 in floats
    ],
)
def test_a_share_is_rounded_down(share: str, length: int, rows: int) -> None:
    plan = Plan.uniform("streaming", budget=share, length=length)
    assert resolved_budgets(plan) == [rows] * 4
    assert {layer.budget_from for layer in plan.resolve(4).layers} == {
        f"{share} of {length:,} tokens is {rows:,} rows"
    }


@given(st.integers(0, 100), st.integers(0, 999), st.integers(1, 10**6))
def test_the_rows_are_the_largest_number_within_the_share(
    whole: int, thousandths: int, length: int
) -> None:
    share = Fraction(whole * 1000 + thousandths, 100_000)
    plan = Plan.uniform("h2o", budget=f"{whole}.{thousandths:03}%", length=length)
    if share > 1 or share * length < 1:
        with pytest.raises(BudgetError, match="budget"):
            plan.resolve(1)
        return
    (rows,) = resolved_budgets(plan, 1)
    assert rows is not None
    assert rows <= share * length < rows + 1


def test_groups_may_have_different_shares() -> None:
    data = {
        "length": 1000,
        "budget": "10%",
        "stack": ["h2o"],
        "layers": [
            {"where": "0:1"},
            {"where": "1:2", "budget": "50%"},
            {"where": "2:", "budget": 77},
        ],
    }
    resolved = Plan.from_dict(data).resolve(4)
    assert [layer.budget for layer in resolved.layers] == [100, 500, 77, 77]
    sources = [layer.to_dict().get("budget_from") for layer in resolved.layers]
    assert sources == [
        "10% of 1,000 tokens is 100 rows",
        "50% of 1,000 tokens is 500 rows",
        None,
        None,
    ]


def test_a_share_resolves_to_the_same_plan_as_its_count() -> None:
    share = Plan.uniform("h2o", budget="25%", length=256).resolve(3)
    count = Plan.uniform("h2o", budget=64).resolve(3)
    assert share == count
    assert share.digest() == count.digest()


def test_overrides_change_share_and_length() -> None:
    data = {"budget": 9, "stack": ["streaming"]}
    plan = Plan.from_dict(data, ["budget=25%", "length=400"])
    assert resolved_budgets(plan) == [100] * 4


@pytest.mark.parametrize(
    ("budget", "length", "message"),
    [
        ("25%", None, "length"),
        ("25%", 0, "length: 0"),
        ("25%", -8, "length: -8"),
        (
            "0%",
            100,
            '"0%"',
        ),
        ("1%", 50, '"1%"'),
        (
            "101%",
            100,
            '"101%"',
        ),
    ],
)
def test_a_share_out_of_range_or_without_length_is_refused(
    budget: str, length: int | None, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.uniform("streaming", budget=budget, length=length).resolve(2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "budget", ["25", "%", "-5%", "25 %", "1e2%", "\uff12\uff15%", ".5%", "25%\n"]
)
def test_malformed_shares_are_refused(budget: str) -> None:
    for make in (
        lambda: Plan.from_dict({"budget": budget, "stack": ["h2o"], "length": 9}),
        lambda: Plan.uniform("h2o", budget=budget, length=9),
        lambda: LayerGroup(budget=budget),
    ):
        with pytest.raises(PlanError, match="budget"):
            make()


def test_an_unused_length_does_not_change_the_digest() -> None:
    with_length = Plan.uniform("h2o", budget=64, length=4096).resolve(2)
    assert with_length.digest() == Plan.uniform("h2o", budget=64).resolve(2).digest()
