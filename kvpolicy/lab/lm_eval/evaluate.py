"""One evaluation by lm-evaluation-harness: its figures, and what they cost under a plan."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import datasets
import lm_eval
import tqdm
from lm_eval.defaults import DEFAULT_OTHER_SEED as FEWSHOT_SEED

from kvpolicy.errors import KVPolicyError, TaskError, error_summary
from kvpolicy.lab.lm_eval.model import PolicyLM
from kvpolicy.lab.lm_eval.tasks import Tasks
from kvpolicy.model.hub import hub_reachable

# What `evaluate` adds to the harness's record.
OURS = "kvpolicy"


def evaluate(
    lm: PolicyLM,
    tasks: Tasks,
    *,
    limit: float | None = None,
    num_fewshot: int | None = None,
    generation: Mapping[str, Any] | None = None,
    seed: int | None = None,
    chat: bool = False,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Ask a model under a plan the questions of tasks.

    Args:
        lm: The model.
        tasks: The tasks.
        limit: The most questions of each task, or, below 1, the share of them.
        num_fewshot: Examples before each question; the task's own number if not given.
        generation: What replaces settings of the tasks' ``generation_kwargs``.
        seed: Chooses examples; the harness's own seed if not given.
        chat: Whether questions are wrapped in the model's chat template.
        log_samples: Whether the record holds every question and answer.

    Returns:
        The record of ``lm_eval.evaluate``, and under ``"kvpolicy"``: ``plan`` and its
        ``plan_digest``, ``model_fingerprint``, ``slots``, ``num_recalled`` (answers that were
        in the journal), ``costs`` of each task as in `Cost`, ``reports`` of each kind of
        request as in `RunReport`, of what was computed in this process.

    Raises:
        KVPolicyError: A task cannot be loaded or asked, or a policy fails.
    """
    with _quiet(), _offline_if_it_is():
        loaded = tasks.load(tasks.names)
        for task in loaded["tasks"].values():
            _adjust(task, num_fewshot, generation or {}, FEWSHOT_SEED if seed is None else seed)
        try:
            record: dict[str, Any] = lm_eval.evaluate(
                lm,
                loaded,
                limit=limit,
                apply_chat_template=chat,
                fewshot_as_multiturn=True,
                log_samples=log_samples,
                confirm_run_unsafe_code=True,  # `tasks` has refused them if they may not
            )
        except KVPolicyError:
            raise
        except Exception as error:  # of a task's own code, or of the package it computes with
            msg = f"the harness failed on {', '.join(tasks.names[:5])}: {error_summary(error)}"
            raise TaskError(msg) from error
    engine = lm.engine
    return record | {
        OURS: {
            "plan": engine.plan.to_dict(),
            **lm.identity,
            "slots": engine.num_slots,
            "num_recalled": lm.num_recalled,
            "costs": {name: cost.to_dict() for name, cost in lm.costs.items()},
            "reports": {what: report.to_dict() for what, report in lm.reports.items()},
        }
    }


def _adjust(task: Any, num_fewshot: int | None, generation: Mapping[str, Any], seed: int) -> None:
    """Set what the user wants otherwise, by the harness's own rules."""
    if generation and task.get_config("output_type") == "generate_until":
        task.set_config("generation_kwargs", dict(generation), update=True)
    usual = task.get_config("num_fewshot")
    if usual is None or (num_fewshot is not None and usual != 0):
        # A task that says 0 means it: examples would give its answers away.
        task.set_config("num_fewshot", num_fewshot or 0)
    task.set_fewshot_seed(seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's log, its bars and those of `datasets` out of our output."""
    logger, begin = logging.getLogger("lm_eval"), tqdm.tqdm.__init__
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # The harness's bars have no switch of their own.
    tqdm.tqdm.__init__ = partialmethod(begin, disable=True)
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = begin
        datasets.enable_progress_bars()
        logger.setLevel(level)


@contextmanager
def _offline_if_it_is() -> Iterator[None]:
    """Without a network, say so at once: `datasets` would try again and again."""
    import huggingface_hub

    if hub_reachable():
        yield
        return
    places: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = was
