"""Plans that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from malformed_plans import MALFORMED

from kvpolicy import Plan, hookimpl, load_policy
from kvpolicy.plan.plan import check_plan

BASE = {"budget": 64, "stack": ["rkv"], "layers": [{"where": "0:2"}, {"where": "2:"}]}


def problems(data: dict[str, Any]) -> Callable[[Path], str]:
    """All problems of a plan, one a line."""
    return lambda _: "\n".join(map(str, check_plan(data, num_layers=4).problems))


def overridden(override: str) -> Callable[[Path], object]:
    return lambda _: Plan.from_dict(BASE, [override]).resolve(4)


def extending(text: str) -> Callable[[Path], object]:
    def load(folder: Path) -> object:
        (folder / "broken.toml").write_text("budget = = 3")
        (folder / "child.toml").write_text(f"extends = {text}\n")
        return Plan.load(folder / "child.toml")

    return load


def shared_out(answer: object) -> Callable[[Path], object]:
    @attrs.define(eq=False)
    class Answers:
        @hookimpl
        def allocate(self) -> object:
            return answer

    return lambda _: Plan.uniform("streaming", Answers(), budget=20).resolve(2)


def entering(**changes: Any) -> Callable[[Path], object]:
    """A plan whose prompts enter in more rows than the buffer."""
    options = {"budget": 32, "buffer": 8, "prefill_buffer": 48} | changes
    return lambda _: Plan.uniform("h2o", **options).resolve(2)


def rows_in(rows: Any) -> Callable[[Path], object]:
    return lambda _: Plan.uniform("h2o", budget=32, rows=rows)


CASES: dict[str, Callable[[Path], object]] = {
    "a policy that is not installed": lambda _: load_policy("snapvk"),
    "a budget of nothing": lambda _: Plan.uniform("h2o", budget=0),
    **{kind: problems(data) for kind, (data, _) in MALFORMED.items()},
    **{
        f"override {override}": overridden(override)
        for override in ("budget", "layers.9.budget=3", "h2o.n_recent=3", "a.b.c.d=3", "budgt=3")
    },
    **{
        f"extends {text}": extending(text)
        for text in ('"none.toml"', '"broken.toml"', '["a.toml", "b.toml"]')
    },
    "extends itself": extending('"child.toml"'),
    **{
        f"allocate answers {answer}": shared_out(answer)
        for answer in ("20, 20", [40], [37, 3], [20, 19])
    },
    "a share of more than all": lambda _: Plan.uniform("h2o", budget="101%", length=100).resolve(2),
    **{
        f"a prefill_buffer with {changes}": entering(**changes)
        for changes in (
            {"buffer": 64},
            {"heads": "shared"},
            {"prompt": "keep"},
            {"padding": "stored"},
        )
    },
    **{
        f"rows in {rows}": rows_in(rows)
        for rows in (
            *("int2", {"key": "int8"}, 8, {}, {"exact": 9}),
            {"keys": "int4", "exact": 0},
            {"keys": "int8", "exact": 9},
            {"values": "int4", "exact": -1},
        )
    },
    "knobs of a policy elsewhere": lambda _: Plan.uniform(
        "rkv", budget=64, knobs={"h2o": {"n_recent": 3}}
    ),
    "a file that is not there": lambda folder: Plan.load(folder / "missing.toml"),
}
