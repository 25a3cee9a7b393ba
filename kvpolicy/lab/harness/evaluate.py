"""One evaluation by lm-evaluation-harness: its figures, and what they cost under a plan."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import datasets
import lm_eval
import tqdm

from kvpolicy.discovery import words_of
from kvpolicy.errors import KVPolicyError, TaskError
from kvpolicy.lab.fingerprint import fingerprint
from kvpolicy.lab.harness.adapter import PolicyLM
from kvpolicy.lab.harness.tasks import Tasks
from kvpolicy.lab.hub import hub_can_be_reached

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
        seed: Chooses examples, and whatever a task draws; the harness's own seeds if not given.
        chat: Whether questions are wrapped in the model's chat template.
        log_samples: Whether the record holds every question and answer.

    Returns:
        The record of ``lm_eval.simple_evaluate``, and under ``"kvpolicy"``: ``plan`` and its
        ``plan_digest``, ``model_fingerprint``, ``slots``, ``costs`` of each task as in `Cost`,
        ``reports`` of each kind of request as in `RunReport`.

    Raises:
        KVPolicyError: A task cannot be loaded or asked, or a policy fails.
    """
    names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    seeds = {} if seed is None else dict.fromkeys(names, seed)
    with _quiet(), _offline_if_it_is():
        try:
            record: dict[str, Any] = lm_eval.simple_evaluate(
                lm,
                tasks=tasks.names,
                task_manager=tasks,
                limit=limit,
                num_fewshot=num_fewshot,
                gen_kwargs=dict(generation or {}) or None,
                apply_chat_template=chat,
                log_samples=log_samples,
                confirm_run_unsafe_code=True,  # `tasks` has refused them if they may not
                **seeds,
            )
        except KVPolicyError:
            raise
        except Exception as error:  # of a task's own code, or of the package it computes with
            msg = f"the harness failed on {', '.join(tasks.names[:5])}: {words_of(error)}"
            raise TaskError(msg) from error
    engine = lm.engine
    return record | {
        OURS: {
            "plan": engine.plan.to_dict(),
            "plan_digest": engine.plan.digest(),
            "model_fingerprint": fingerprint(engine.seam.model),
            "slots": engine.num_slots,
            "costs": {name: cost.to_dict() for name, cost in lm.costs.items()},
            "reports": {what: report.to_dict() for what, report in lm.reports.items()},
        }
    }


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

    if hub_can_be_reached():
        yield
        return
    places = (huggingface_hub.constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = was
