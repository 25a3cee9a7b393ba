"""One line in a plugin author's test: ``check_policy(MyPolicy)``."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvpolicy.errors import KVPolicyError, PolicyLoadError
from kvpolicy.hooks.stack import Stack
from kvpolicy.testing.clauses import ConformanceError, Example
from kvpolicy.testing.knobs import check_knobs
from kvpolicy.testing.maker import Maker
from kvpolicy.testing.report import Report
from kvpolicy.testing.setup import World

#: Cases of one policy.
PROFILES = {"quick": 100, "ci": 1_000, "thorough": 10_000}

# Hypothesis remembers all that it has drawn in a round: many short ones are faster.
_ROUND = 500

# Told after every round: cases done, of how many.
Progress = Callable[[int, int], None]


def check_policy(
    factory: Any,
    *,
    knobs: dict[str, Any] | None = None,
    profile: str = "quick",
    max_examples: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    hidden_size: int = 16,
    num_layers: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Hold a policy against the whole contract, in cases that Hypothesis draws.

    Requests of drawn lengths arrive in an engine of drawn sizes, are prefilled, decoded,
    compacted, released and cancelled, with the policy alone, under a wrapper, and beside
    another policy in other layers; every hook call is watched, and every request is served
    once more alone. The model is a toy of a few tensors; it reads and writes a few tokens of
    the tokenizer, among them line breaks and think tags.

    Args:
        factory: The policy's class, a function that builds one, or the name of an installed
            policy.
        knobs: Its knobs, with a name.
        profile: How many cases: ``"quick"`` 100, ``"ci"`` 1,000, ``"thorough"`` 10,000.
        max_examples: How many cases, whatever the profile.
        seed: Equal seeds draw equal cases.
        tokenizer: What policies are given as such; a small one with line breaks and
            ``<think>`` tags if not given.
        hidden_size: Size of the hidden states, for policies with a steering vector.
        num_layers: Decoder layers, for policies that name one.
        progress: Told the cases done and wanted, now and then.

    Returns:
        What was checked; it prints well.

    Raises:
        ConformanceError: If a clause is broken, with a minimal example.
        KVPolicyError: If Hypothesis is not installed, or the arguments make no sense.
    """
    run_round = _machine()
    if profile not in PROFILES:
        msg = f"there is no profile {profile!r}; known are {', '.join(PROFILES)}"
        raise KVPolicyError(msg)
    cases = PROFILES[profile] if max_examples is None else max_examples
    for what, value in (("max_examples", cases), ("num_layers", num_layers)):
        if not isinstance(value, int) or value < 1:
            msg = f"check_policy was given {what}={value!r}; at least 1 is needed"
            raise KVPolicyError(msg)
    start = time.perf_counter()
    maker = Maker.of(factory, knobs)
    world = World.of(tokenizer, hidden_size, num_layers)
    checked: Counter[str] = Counter()
    check_building(maker)
    checked["building"] += 1
    for done in range(0, cases, _ROUND):
        examples = min(_ROUND, cases - done)
        run_round(maker, world, examples=examples, seed=seed + done, checked=checked)
        if progress is not None:
            progress(done + examples, cases)
    checked["knobs"] += check_knobs(maker, world)
    return Report(maker.name, cases, time.perf_counter() - start, checked)


def check_building(maker: Maker) -> None:
    """See that a factory builds new policies that fit the hook specs.

    Raises:
        ConformanceError: If it does not.
    """
    code = f"from kvpolicy.testing import Trial\n\nTrial({maker.words}, budget=8)"
    example = Example("one policy", code)
    try:
        first, second = maker.build(), maker.build()
        Stack([(maker.name, first)])
    except PolicyLoadError as error:
        expected = "a policy that fits the hook specs"
        broken = ("building", expected, str(error))
        raise ConformanceError(*broken, maker.name, example) from error
    if first is second:
        came = f"{first!r:.80} twice"
        broken = ("building", "a new policy each time", came)
        raise ConformanceError(*broken, maker.name, example)


def _machine() -> Any:
    try:
        from kvpolicy.testing.machine import run_round
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        msg = "check_policy needs Hypothesis; install it: pip install 'kvpolicy[testing]'"
        raise KVPolicyError(msg) from error
    return run_round
