"""Calls of the engine that are refused, and policies that fail in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from families import family_model
from safetensors.torch import save_file
from tiny import shared_model, tiny_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import (
    CacheView,
    Engine,
    Extension,
    Lookahead,
    Plan,
    PrefixStore,
    Request,
    Sampling,
    SequenceSnapshot,
    hookimpl,
    select_rows,
)

TIGHT = Plan.uniform("h2o", budget=8, buffer=4)


def engine(plan: Plan = TIGHT, **options: Any) -> Engine:
    return Engine(shared_model(), tiny_tokenizer(), plan, **options)


def error_of(prompt: Any, **options: Any) -> str:
    """The error of the result of a request."""
    (result,) = engine().generate([Request(prompt, 3, **options)]).results()
    return str(result.error)


def run_with(*stack: object, **options: Any) -> Callable[[Path], object]:
    """A run in which policies are asked."""
    plan = Plan.uniform(*stack, budget=8, buffer=4, **options)
    return lambda _: engine(plan).generate([[1, 2, 3] * 5]).results()


def snapshot_of_another_plan(_: Path) -> str:
    other = engine(Plan.uniform("h2o", budget=9, buffer=4))
    (result,) = other.generate([Request([1, 2], 3, snapshot=True)]).results()
    return error_of((), resume=result.snapshot)


def other_tensors(folder: Path) -> object:
    save_file({"a": torch.ones(2)}, folder / "a.safetensors")
    return SequenceSnapshot.load(folder / "a.safetensors")


@attrs.frozen(eq=False)
class Scores:
    """Answers `score` by a function of the positions."""

    of: Callable[[Tensor], object]

    @hookimpl
    def score(self, positions: Tensor) -> object:
        return self.of(positions)


@attrs.frozen(eq=False)
class Selects:
    """Answers `select` by a function of the scores and the budget."""

    of: Callable[[Tensor, int], object]

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions.float()

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> object:
        return self.of(scores, budget)


@attrs.frozen(eq=False)
class Lookaheads:
    """Answers `lookahead`."""

    answer: object
    lookahead_size: int = 8

    @hookimpl
    def lookahead(self) -> object:
        return self.answer


class LookaheadsUndeclared:
    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(num_greedy=1)


class AnnotationsUndeclared:
    @hookimpl
    def annotate(self, keys: Tensor) -> None:
        return None


def fails(_: Tensor) -> Tensor:
    msg = "no scores today"
    raise ValueError(msg)


ROWS = CacheView(positions=torch.arange(20).expand(1, 2, 20))

CASES: dict[str, Callable[[Path], object]] = {
    "a prefill_buffer in a sliding window": lambda _: Engine(
        family_model("mistral"),
        plan=Plan.uniform("h2o", budget=4, buffer=2, prefill_buffer=8),
    ),
    "rows in integers of heads of 6 channels": lambda _: Engine(
        tiny_model(head_dim=6), plan=Plan.uniform("full", rows="int8")
    ),
    "a model that is a name": lambda _: Engine("reasoner", None, TIGHT),
    "no slots": lambda _: engine(slots=0),
    "more steps before tokens are read than are launched": lambda _: engine(steps_per_read=4),
    "an extension and not its class": lambda _: engine(extensions=[Extension()]),
    "one class of extensions and no list": lambda _: engine(extensions=Extension),
    "one prompt": lambda _: engine().generate("hello"),
    "too few samplings": lambda _: engine().generate(["a", "b"], sampling=[Sampling()]),
    "an empty stop string": lambda _: engine().generate(["a"], stop=""),
    "a temperature below 0": lambda _: Sampling(-1),
    "a deadline below 0": lambda _: Request([1], deadline_s=-1),
    "cancelling an unknown request": lambda _: engine().generate(["a"]).cancel(7),
    "a limit of an open run": lambda _: engine().open_run(max_len=1),
    "no memory for one sequence": lambda _: engine().open_run(max_len=80, kv_memory=1000),
    "a full queue": lambda _: [
        run := engine(slots=1).open_run(max_len=40, max_waiting=0),
        [run.submit(Request([1])) for _ in range(2)],
    ],
    "a closed run": lambda _: [
        run := engine().open_run(max_len=40),
        run.close(),
        run.submit(Request([1])),
    ],
    "an empty prompt": lambda _: error_of(""),
    "a long prompt": lambda _: error_of("ab " * 70_000),
    "a token outside of the vocabulary": lambda _: error_of([1, 99]),
    "a tokenizer with more tokens than the model": lambda _: (
        Engine(shared_model(), tiny_tokenizer(70), TIGHT).generate(["<69>"]).results()[0].error
    ),
    "half a surrogate pair": lambda _: error_of("a \ud83d b"),
    "logprobs of a prompt that may be evicted": lambda _: error_of([1] * 9, prompt_logprobs=0),
    "a snapshot of another plan": snapshot_of_another_plan,
    "a snapshot that is none": other_tensors,
    "a snapshot of what has not begun": lambda _: engine().generate([[1]]).snapshot(0),
    "a policy that raises": run_with(Scores(fails)),
    "scores of another dtype": run_with(Scores(lambda positions: positions)),
    "scores of another shape": run_with(Scores(lambda positions: positions[:, :, 1:].float())),
    "scores that are NaN": run_with(Scores(lambda positions: positions * torch.nan)),
    "too many rows": run_with(Selects(lambda scores, _: scores.argsort(dim=2).sort(2).values)),
    "rows that do not exist": run_with(
        Selects(lambda scores, budget: scores.argsort(dim=2).sort(2).values[..., :budget] + 99)
    ),
    "a wrong lookahead": run_with("streaming", Lookaheads("ab")),
    "a lookahead that is too long": run_with("streaming", Lookaheads(Lookahead(num_greedy=9))),
    "a lookahead without a size": run_with("streaming", LookaheadsUndeclared()),
    "annotations without a track": run_with("streaming", AnnotationsUndeclared()),
    "a decision without keys": lambda _: select_rows("snapkv", ROWS, budget=12),
    "a decision without sums": lambda _: select_rows("h2o", ROWS, budget=12),
    "a decision within a window": lambda _: select_rows("snapkv", ROWS, budget=7),
    "a store of nothing": lambda _: PrefixStore(0),
    "a store with a misspelled knob": lambda _: PrefixStore(1000, eviction="lro"),
    "a store on an unknown device": lambda _: PrefixStore(1000, device="gpu7"),
    "bytes for a spill without a folder": lambda _: PrefixStore(1000, spill_bytes=10),
}
