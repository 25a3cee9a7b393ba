"""The texts and plans whose tokens are compared: the bundled reasoner's under all its policies."""

from dataclasses import dataclass
from typing import Any

from kvpolicy import Plan

_SEED = 5


@dataclass(frozen=True)
class Sizes:
    """How many texts there are, how long they get, and how many rows stay."""

    num_texts: int
    new_tokens: int
    budget: int
    buffer: int
    generated: int  # tokens from `generate`: 1 more than a multiple of the steps between reads


FULL = Sizes(num_texts=12, new_tokens=300, budget=96, buffer=16, generated=97)
QUICK = Sizes(num_texts=2, new_tokens=34, budget=48, buffer=8, generated=17)

_H2O = {"policy": "h2o", "n_recent": 8}
_SNAPKV = {"policy": "snapkv", "window_size": 16, "kernel_size": 3}
_STEERED = {"policy": "skipkv", "tau": 0.95, "vector": "reasoner", "layer": 3, "gamma": 0.02}
_MIXED = {"policy": "mix", "of": [_SNAPKV, {"policy": "h2o", "n_recent": 8}]}
_EPICACHE = {"policy": "epicache", "prompt": "", "n_last": 32}

# Stacks by the names of lines and results; all installed policies are among them.
STACKS: dict[str, tuple[Any, ...]] = {
    "full": ("full",),
    "streaming": ("streaming",),
    "h2o": (_H2O,),
    "h2o_last": ("h2o_last",),
    "h2o_shared": ("h2o_shared",),
    "tova": ("tova",),
    "knorm": ("knorm",),
    "random": ("random",),
    "pyramidkv": ("pyramidkv",),
    "snapkv": (_SNAPKV,),
    "rkv": ("rkv",),
    "skipkv": ("skipkv",),
    "skipkv, steered": (_STEERED,),
    "skipkv_batches": ("h2o",),
    "full+seal": ("full", "seal"),
    "streaming+rerotate": ("streaming", "rerotate"),
    "expected_attention": ("expected_attention",),
    "laq": ({"policy": "laq", "n_local": 8, "kernel_size": 3},),
    "obcache": ("obcache",),
    "obcache_history": ("obcache_history",),
    "keydiff": ("keydiff",),
    "epicache": (_EPICACHE,),
    "trimkv": ({"policy": "trimkv", "gates": "reasoner"},),
    "lazy_eviction": ({"policy": "lazy_eviction", "window_size": 16},),
    "layer_sensitivity+h2o": (
        {"policy": "layer_sensitivity", "table": "reasoner", "alpha": 0.5},
        _H2O,
    ),
    "h2o+caote": (_H2O, "caote"),
    "snapkv+adakv": (_SNAPKV, "adakv"),
    "rkv+protect": ("rkv", "protect"),
    "h2o+merge": (_H2O, "merge"),
    "snapkv+mix": (_MIXED,),
}
_SHARED_HEADS = ("snapkv+adakv",)
_SCHEDULES = {"skipkv_batches": ("skipkv_batches",)}

# What a rehearsal computes: one of each kind.
QUICK_STACKS = (*("full", "h2o", "snapkv", "skipkv, steered", "laq", "snapkv+adakv", "h2o+merge"),)

# What takes longer is compared under these only.
DRAWN = ("full", "h2o", "snapkv", "rkv")
GENERATED = ("full", "streaming", "h2o", "snapkv", "rkv", "skipkv")


def plan_named(name: str, sizes: Sizes, *more: object) -> Plan:
    """A plan of `STACKS`, with more policies around its own."""
    evicts = not name.startswith("full")
    return Plan.uniform(
        *STACKS[name],
        *more,
        budget=sizes.budget if evicts else None,
        buffer=sizes.buffer if evicts else None,
        schedule=_SCHEDULES.get(name, ()),
        heads="shared" if name in _SHARED_HEADS else "own",
    )


def prompts_of(tokenizer: Any, sizes: Sizes) -> list[list[int]]:
    """Token ids of the reasoner's problems."""
    from kvpolicy_reasoner.task import make_problems

    problems = make_problems(sizes.num_texts, seed=_SEED)
    return [tokenizer(problem.prompt)["input_ids"] for problem in problems]
