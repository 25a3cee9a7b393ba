"""Speed of the engine under several plans, compared with ``generate`` and kvpress.

All contenders run in turns in one process on one model with random weights, which decodes as
fast as a trained one. Each round starts with another contender, and speeds are compared within a
round, so that changes of the machine's speed affect all contenders equally.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.baselines import KVPRESS, generate, model_alone, presses_for
from kvpolicy.lab.bench.contender import (
    Contender,
    Measurement,
    Prompts,
    durations,
    synchronized_time,
)
from kvpolicy.lab.looks import policy_of
from kvpolicy.lab.sweep.grid import Cell

_NUM_WARM_UP = 8  # tokens

# One contender's part of one round: its name, and what was measured.
Turn = tuple[str, Measurement]


@attrs.frozen
class Workload:
    """The work of every contender.

    Attributes:
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each sequence, at least 3.
        seed: Random seed for weights and prompts.
    """

    batch: int
    prompt_min: int
    prompt_max: int
    new_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts; their lengths are spread evenly and shuffled."""
        rng = torch.Generator().manual_seed(self.seed)
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.batch).round().long()
        lengths = lengths[torch.randperm(self.batch, generator=rng)]
        return [
            torch.randint(vocab_size, (int(length),), generator=rng).tolist() for length in lengths
        ]


def build_contenders(
    model: PreTrainedModel, cells: Sequence[Cell], *, with_generate: bool = True
) -> tuple[list[Contender], dict[str, str]]:
    """All contenders of a benchmark.

    Args:
        model: The model.
        cells: The engine's plans.
        with_generate: Whether to include transformers' ``generate``.

    Returns:
        The contenders: ``generate`` and the model alone, then each plan followed by kvpress with
        the same policy, if it has it; and libraries that are absent, with the reason.

    Raises:
        KVPolicyError: Two contenders have the same name.
    """
    presses, absent = presses_for(model, cells)
    contenders = [*([generate(model)] if with_generate else []), model_alone(model)]
    for cell in cells:
        press = presses.get(cell.digest)
        contenders.append(_engine(model, cell, press))
        contenders += [] if press is None else [press]
    (name, count), *_ = Counter(one.name for one in contenders).most_common(1)
    if count > 1:
        msg = (
            f"bench was given {count} contenders called {name!r}, which tables could not "
            "distinguish; the name of a plan file without its suffix is the name: rename one."
        )
        raise KVPolicyError(msg)
    return contenders, {} if absent is None else {KVPRESS: absent}


def measure(
    contenders: Sequence[Contender], workload: Workload, vocab_size: int, *, rounds: int
) -> Iterator[Turn]:
    """Run all contenders in turns, after a short warm-up of each.

    Args:
        contenders: The contenders.
        workload: The work of each.
        vocab_size: Number of tokens that prompts are sampled from.
        rounds: Number of rounds.

    Yields:
        Each turn as it ends.
    """
    prompts = workload.prompts(vocab_size)
    for contender in contenders:
        contender.run(prompts, min(_NUM_WARM_UP, workload.new_tokens))
    for number in range(rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            yield contender.name, contender.run(prompts, workload.new_tokens)


def _engine(model: PreTrainedModel, cell: Cell, press: Contender | None) -> Contender:
    """The engine under one plan."""

    def run(prompts: Prompts, new_tokens: int) -> Measurement:
        engine = Engine(model, None, cell.resolved, slots=len(prompts))
        run = engine.generate(prompts, max_new_tokens=new_tokens, stop_ids=())
        row_bytes = [layer.shape.row_bytes for layer in run.cache.layers]
        times, attended = [], []
        while not run.done:
            # A step attends to the rows before it and to its own.
            attended.append(int(row_bytes @ (run.cache.rows.sum(axis=1) + len(prompts))))
            results = run.step().results
            times.append(synchronized_time(model.device))
            assert not any(result.error for result in results), results
        report = run.report
        # The first step of the loop is the prefill and the first decode step.
        return Measurement(
            prefill_s=report.prefill_s,
            steps_s=durations(times),
            kv_bytes=report.peak_kv_bytes,
            read_bytes=sum(attended[1:]),
            policy_share=report.policy_share,
        )

    baseline = None if press is None else press.name
    policy = policy_of(cell.resolved.to_dict())
    return Contender(cell.series, run, cell.budget, baseline, policy)
