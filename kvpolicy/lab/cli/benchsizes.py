"""How much a benchmark does: what is asked for, or else a full run's or a quick one's."""

from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError


@attrs.frozen
class Sizes:
    """What a benchmark does, and how often.

    Attributes:
        shape: Name of the model's shape.
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each.
        budget: Rows that stay.
        buffer: Rows that may join.
        rounds: Times everybody takes a turn.
        lengths: Generated tokens at which memory is looked at.
    """

    shape: str = "100m"
    batch: int = 8
    prompt_min: int = 64
    prompt_max: int = 256
    new_tokens: int = 2048
    budget: int = 512
    buffer: int = 128
    rounds: int = 5
    lengths: tuple[int, ...] = (1000, 2000, 5000, 10_000, 20_000)


_QUICK = Sizes("tiny", 4, 16, 48, 256, 48, 16, 3, (100, 200, 500))
_LONG = attrs.evolve(Sizes(), shape="5m")  # a whole run of the larger model would take hours


def sizes(*, quick: bool, memory: bool, **given: Any) -> Sizes:
    """What is asked for, filled up.

    Args:
        quick: Whether the rest is a quick run's.
        memory: Whether memory is watched over a long text.
        given: Fields of `Sizes`; ``None`` for those that are left open.

    Raises:
        KVPolicyError: They do not fit each other.
    """
    base = _QUICK if quick else _LONG if memory else Sizes()
    asked = {name: value for name, value in given.items() if value not in (None, ())}
    found = attrs.evolve(base, **asked)
    if found.prompt_max < found.prompt_min:
        msg = f"--prompt-max {found.prompt_max} is below --prompt-min {found.prompt_min}."
        raise KVPolicyError(msg)
    return attrs.evolve(found, lengths=tuple(sorted(set(found.lengths))))
