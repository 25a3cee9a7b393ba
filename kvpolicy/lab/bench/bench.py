"""Speed of the engine under several plans against ``generate`` and against kvpress.

All contenders run in turns in one process on one model with random weights, which decodes
as fast as a trained one. Each round begins with another contender, and speeds are compared
within a round, so that what the machine does meanwhile falls on all alike.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.baselines import generate, model_alone
from kvpolicy.lab.bench.contender import Contender, Effort, Prompts, now
from kvpolicy.lab.bench.press import presses_for
from kvpolicy.lab.sweep.grid import Cell


@attrs.frozen
class Workload:
    """What every contender has to do.

    Attributes:
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each, at least 3.
        seed: Chooses weights and prompts.
    """

    batch: int
    prompt_min: int
    prompt_max: int
    new_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts, their lengths spread evenly and in no order."""
        rng = torch.Generator().manual_seed(self.seed)
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.batch).round().long()
        lengths = lengths[torch.randperm(self.batch, generator=rng)]
        return [
            torch.randint(vocab_size, (int(length),), generator=rng).tolist() for length in lengths
        ]


@attrs.frozen
class Turn:
    """One contender's part of one round.

    Attributes:
        round: Number of the round.
        name: The contender.
        effort: What it did.
    """

    round: int
    name: str
    effort: Effort


def line_up(
    model: PreTrainedModel, cells: Sequence[Cell], *, with_generate: bool = True
) -> tuple[list[Contender], dict[str, str]]:
    """Everybody who takes part.

    Args:
        model: The model.
        cells: The engine's plans.
        with_generate: Whether transformers' ``generate`` takes part.

    Returns:
        The contenders, ``generate`` and the model alone first, each plan followed by its rival
        in kvpress, if there is one; and who is absent, with the reason.

    Raises:
        KVPolicyError: Two have one name, by which turns are told apart.
    """
    presses = presses_for(model, list(cells))
    contenders = [*([generate(model)] if with_generate else []), model_alone(model)]
    for cell in cells:
        rival = presses.contenders.get(cell.digest)
        contenders.append(_engine(model, cell, rival))
        contenders += [] if rival is None else [rival]
    _check_names(contenders)
    return contenders, {} if presses.absent is None else {"kvpress": presses.absent}


def measure(
    contenders: Sequence[Contender], workload: Workload, vocab_size: int, *, rounds: int
) -> Iterator[Turn]:
    """Run all contenders in turns, after a few tokens of each that do not count.

    Args:
        contenders: Who takes part.
        workload: What each does.
        vocab_size: Tokens that prompts are drawn from.
        rounds: How many times.

    Yields:
        Each contender's turn as it ends.
    """
    prompts = workload.prompts(vocab_size)
    for contender in contenders:
        contender.run(prompts, min(8, workload.new_tokens))
    for number in range(rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            effort = contender.run(prompts, workload.new_tokens)
            yield Turn(number, contender.name, effort)


def _check_names(contenders: Sequence[Contender]) -> None:
    (name, times), *_ = Counter(one.name for one in contenders).most_common(1)
    if times > 1:
        msg = (
            f"bench was given {times} contenders called {name!r}, whose turns cannot be told "
            "apart; a plan file is called what stands before its ending: rename one."
        )
        raise KVPolicyError(msg)


def _engine(model: PreTrainedModel, cell: Cell, rival: Contender | None) -> Contender:
    """The engine under one plan."""

    def run(prompts: Prompts, new_tokens: int) -> Effort:
        engine = Engine(model, None, cell.resolved, slots=len(prompts))
        run = engine.generate(prompts, max_new_tokens=new_tokens, stop_ids=())
        row_bytes = [layer.shape.row_bytes for layer in run.cache.layers]
        steps, read_bytes = [], 0
        done, after = False, 0.0
        while not done:
            # A step attends to what was held before it and to its own row.
            attended = int(row_bytes @ (run.cache.rows.sum(axis=1) + len(prompts)))
            before = after
            results = run.step().results
            after = now(model.device)
            assert not any(result.error for result in results), results
            done = run.done
            if before:
                steps.append(after - before)
                read_bytes += attended
        report = run.report
        return Effort(
            prefill_s=report.prefill_s,
            steps_s=tuple(steps),
            kv_bytes=report.peak_kv_bytes,
            read_bytes=read_bytes,
            policy_share=report.policy_share,
        )

    return Contender(cell.series, run, cell.budget, None if rival is None else rival.name)
