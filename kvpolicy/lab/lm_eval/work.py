"""What the engine is to answer, and what of it a journal has answered already."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request
from kvpolicy.engine.results import Result, RunReport
from kvpolicy.engine.run import Run
from kvpolicy.errors import RequestError
from kvpolicy.lab.lm_eval.journal import Answer, Journal, key_of


class Work(Protocol):
    """Something to be answered by sequences of the engine."""

    @property
    def keys(self) -> Sequence[str]:
        """One for each sequence: what tells its answer from all others of a run."""

    def begin(self, which: Sequence[int]) -> Run:
        """Have some of it answered; request ``i`` of the run is number ``which[i]``."""

    def answer(self, number: int, result: Result) -> Answer:
        """What is to be kept of one that has been answered."""

    def recall(self, number: int, answer: Answer) -> None:
        """Take what was kept of one."""


class Generating:
    """Texts to be generated; their results say it all."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Note what is asked; nothing is computed yet."""
        self._engine, self._requests = engine, requests
        self.keys = [key_of(request) for request in requests]

    def begin(self, which: Sequence[int]) -> Run:
        """Generate some of the texts."""
        return self._engine.generate([self._requests[number] for number in which])

    def answer(self, number: int, result: Result) -> Answer:
        """What is to be kept of a text."""
        return Answer(result)

    def recall(self, number: int, answer: Answer) -> None:
        """There is nothing to take beside the result."""


def recalled(work: Work, journal: Journal) -> dict[int, Answer]:
    """What a journal has of some work, by number."""
    found = {number: journal.recall(key) for number, key in enumerate(work.keys)}
    return {number: answer for number, answer in found.items() if answer is not None}


def results_of(
    work: Work,
    journal: Journal,
    known: Mapping[int, Answer],
    note: Callable[[RunReport], None],
) -> Iterator[Result]:
    """Give results, with the numbers of the work as their ids: those that are known first.

    Args:
        work: What is asked.
        journal: Where new answers are kept, each before its result is given.
        known: What `recalled` has found.
        note: Is told what the run has cost so far.

    Raises:
        RequestError: A request was refused, or a policy failed.
    """
    for number, answer in known.items():
        work.recall(number, answer)
        yield attrs.evolve(answer.result, id=number)
    missing = [number for number in range(len(work.keys)) if number not in known]
    if not missing:
        return
    run = work.begin(missing)
    for result in run:
        note(run.report)
        if result.error is not None:
            raise RequestError(result.error)
        number = missing[result.id]
        journal.keep(work.keys[number], work.answer(number, result))
        yield attrs.evolve(result, id=number)
    note(run.report)
