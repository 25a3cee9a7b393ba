"""Policies that are built, listed or prompted wrongly."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from tiny import shared_model

from kvpolicy import Engine, Plan, load_block_eviction, load_policy
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.testing import keep_rows


def built(policy: str, **knobs: object) -> Callable[[Path], object]:
    return lambda _: load_policy(policy, **knobs)


def resolved(*policies: str | PolicySpec, **options: object) -> Callable[[Path], object]:
    return lambda _: Plan.uniform(*policies, **{"budget": 64, "buffer": 8, **options}).resolve(2)


def prompted(policy: str) -> Callable[[Path], object]:
    """A run without a tokenizer."""
    plan = Plan.uniform(policy, budget=32)
    return lambda _: Engine(shared_model(), None, plan).generate([[1, 2]]).results()


def kept(policy: str, budget: int) -> Callable[[Path], object]:
    keys = torch.zeros(1, 1, 40, 4)
    return lambda _: keep_rows(policy, keys, keys, keys, budget=budget)


def guarded(**knobs: object) -> Callable[[Path], object]:
    return lambda _: load_block_eviction("guard", capacity=4, rng=Random(0), **knobs)


def pickled(folder: Path) -> object:
    torch.save({"bias": torch.ones(2)}, folder / "gates.pth")
    return load_policy("trimkv", gates=str(folder / "gates.pth"))


CASES: dict[str, Callable[[Path], object]] = {
    "a knob below its range": built("streaming", n_sink=-1),
    "a knob of the wrong type": built("rkv", window_size="8"),
    "a knob that does not exist": built("streaming", n_snik=3),
    "a knob of a policy without knobs": built("rerotate", n_sink=1),
    "a choice that does not exist": built("snapkv", pooling="median"),
    "a number that is even": built("snapkv", kernel_size=4),
    "a list of what is no layer": built("knorm", skip_layers=["0"]),
    "no number": built("expected_attention", epsilon=float("nan")),
    "a mixture of nothing": built("mix", of=[]),
    "a part that does not exist": built("mix", of=["streaming", "h20"]),
    "a knob of a part": built("mix", of=[{"policy": "rkv", "mix_lambda": 2}]),
    "a weight that is no number": built("mix", of=[{"policy": "h2o", "weight": "text"}]),
    "delimiters of no characters": built("skipkv", delimiters=[""]),
    "no last tokens": built("epicache", n_last=9, lookahead_size=8),
    "gates that are not installed": built("trimkv", gates="reasonr"),
    "gates in a pickle": pickled,
    "caote without masses": resolved("rkv", "caote"),
    "caote alone": resolved("caote"),
    "caote twice": resolved("h2o", "caote", PolicySpec("caote")),
    "a budget of less than is protected": resolved("skipkv", budget=7),
    "a compaction to less than is protected": kept("snapkv", 7),
    "skipkv without a tokenizer": prompted("skipkv"),
    "epicache without a tokenizer": prompted("epicache"),
    "a count below 0": guarded(relax_times=-1),
    "a probability above 1": guarded(relax_prob=1.5),
    "two ways to relax": guarded(relax_times=2, relax_prob=0.5),
    "nothing to relax": guarded(protection=False, relax_times=2),
    "a predictor that does not exist": guarded(predictor="oracle"),
    "an eviction that is not installed": lambda _: load_block_eviction(
        "gaurd", capacity=2, rng=Random(0)
    ),
}
