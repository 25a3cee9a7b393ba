"""Knobs that no policy takes: each is refused when the policy is built, and named."""

import math

import pytest

from kvpolicy import installed_policies, load_policy
from kvpolicy.errors import KnobError

COUNT = (-1, 1.5)  # what is no count
PHASES = {"phase": ["both"], "group_reduce": ["min"], "kernel_size": [4, 0], "pooling": ["median"]}

#: Values that are refused, by policy and knob. A knob of that name need not exist.
WRONG: dict[str, dict[str, list[object]]] = {
    "adakv": {"alpha_safeguard": [-0.1, 1.1, "0.2", None]},
    "caote": {"fast": [1], "greedy": ["yes"], "slow": [True]},
    "epicache": {
        "prompt": [3, [-1], ""],
        "n_last": [-1],
        "lookahead_size": [0],
        "n_sink": [-1],
        "n_recent": [0.5],
    },
    "expected_attention": {
        "window_size": [0],
        "n_future": [0],
        "n_sink": [-1],
        "use_covariance": [1],
        "use_vnorm": [None],
        "epsilon": [-0.1, math.nan],
        "n_future_positions": [512],
    },
    "full": {"budget": [3]},
    "h2o": {"n_recent": [0, -2, "8"], "every": [0], "recent_size": [4]},
    "h2o_last": {"window_size": [1]},
    "h2o_shared": {"window_size": [1]},
    "keydiff": {"n_recent": [*COUNT], "recent": [2]},
    "knorm": {"n_recent": [*COUNT], "skip_layers": [1, ["0"], [-1]], "skip": [[0]]},
    "laq": {
        "n_lookahead": [-1],
        "n_local": [1.5],
        "compat_mask": [1],
        "window_size": [8],
        **PHASES,
    },
    "layer_sensitivity": {"alpha": [-1], "least": [2], "variant": ["v3"], "table": [3]},
    "lazy_eviction": {"window_size": [0], "alpha": [0.0, 1.0, "0.1"]},
    "merge": {"beta": [-0.1, 1.5, "half"], "weights": ["max"], "merge_keys": [1]},
    "mix": {
        "of": [
            [],
            "h2o",
            [3],
            [{"weight": 1.0}],
            *(
                [{"policy": "h2o", "weight": weight}]
                for weight in (-1, 0, math.inf, math.nan, True, "text")
            ),
        ],
        "normalise": ["borda"],
    },
    "obcache": {
        "saliency": ["vv"],
        "host": ["h2o"],
        "window_size": [0],
        "n_recent": [-1],
        "n_sink": [-1],
        "every": [0],
        "window": [8],
        **PHASES,
    },
    "obcache_history": {
        "saliency": ["attention"],
        "window_size": [0],
        "n_recent": [-1],
        "n_sink": [-1],
        "every": [0],
    },
    "protect": {"n_sink": [-1], "n_recent": [*COUNT]},
    "protect_images": {},
    "pyramidkv": {"beta": [0.5, "20"], "window_size": [0], **PHASES},
    "random": {"seed": [-1, 2**32, 0.5]},
    "rerotate": {"n_sink": [1]},
    "rkv": {
        "mix_lambda": [1.5, -0.1],
        "window_size": [0, None],
        "kernel_size": [6],
        "pooling": ["sum"],
        "similarity_threshold": [2],
        "retain_direction": ["middle"],
        "retain_ratio": [0.1],
    },
    "seal": {
        "strength": ["text", math.nan],
        "layer": [*COUNT],
        "delimiter": [""],
        "think": [["<think>"], "<think>"],
        "vector": [3],
        "strenght": [1.0],
    },
    "skipkv": {
        "tau": [0, 1.5, "high"],
        "mix_lambda": [-0.1],
        "window_size": [0],
        "kernel_size": [4],
        "pair": ["first"],
        "merge_delimiters": ["yes"],
        "delimiters": [[1.5], [], [""]],
    },
    "skipkv_batches": {"batch_size": [-1, 2.5], "by_length": [1]},
    "snapkv": {"window_size": [0, None], "window": [8], **PHASES},
    "streaming": {"n_sink": [-1, 2.5], "n_sinks": [4]},
    "tova": {"every": [0, "1"], "n_recent": [-1], "cache_size": [8]},
    "trimkv": {
        "newest_age": [-1],
        "horizon": [0],
        "floor_ratio": [1.5],
        "threshold": [1.0],
    },
}

#: Knobs that do not go together.
CLASHING: list[tuple[str, dict[str, object]]] = [
    ("epicache", {"prompt": [], "n_last": 0}),
    ("epicache", {"n_last": 9, "lookahead_size": 8}),
    ("laq", {"n_lookahead": 0, "n_local": 0}),
]


def problem(policy: str, knobs: dict[str, object]) -> str | None:
    """What is wrong with the refusal of a policy with these knobs."""
    case = f"{policy} {knobs}"
    try:
        load_policy(policy, **knobs)
    except KnobError as error:
        named = policy in str(error) and any(knob in str(error) for knob in knobs)
        return None if named else f"{case}: {error}"
    return f"{case} is accepted"


@pytest.mark.needs_reasoner
def test_wrong_knobs_are_refused_and_named() -> None:
    cases = [
        (policy, {knob: value})
        for policy, wrong in WRONG.items()
        for knob, values in wrong.items()
        for value in values
    ]
    assert [found for case in [*cases, *CLASHING] if (found := problem(*case))] == []


def test_every_policy_is_in_the_table() -> None:
    assert {policy.name for policy in installed_policies()} <= WRONG.keys()
