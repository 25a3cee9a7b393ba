"""The limits of a run that accepts requests while it goes on."""

from typing import Any

import attrs

from kvpolicy.engine.memory.footprint import slots_within
from kvpolicy.errors import KVPolicyError


@attrs.frozen
class Limits:
    """What an open run accepts, from which slabs have their size.

    Attributes:
        max_len: The most tokens of a sequence.
        max_prompt_len: The most tokens of a prompt.
        num_slots: Sequences that are served together.
        most_open: Requests without a result at most; ``None``: any number.
    """

    max_len: int
    max_prompt_len: int
    num_slots: int
    most_open: int | None

    @classmethod
    def of(
        cls,
        engine: Any,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
    ) -> "Limits":
        """The limits of an engine; the arguments are those of `Engine.open_run`.

        Raises:
            KVPolicyError: If one is invalid, or ``kv_memory`` has no room for one sequence.
        """
        positions = engine.adapter.max_positions
        longest = _limit("max_len", max_len, 2, positions)
        longest_prompt = _limit("max_prompt_len", max_prompt_len, 1, longest)
        num_slots = engine.num_slots
        if kv_memory is not None:
            _limit("kv_memory", kv_memory, 1, None)
            num_slots = slots_within(
                kv_memory,
                engine.plan,
                engine.adapter,
                longest=longest,
                longest_prompt=longest_prompt,
                max_tokens_per_forward=engine.max_tokens_per_forward,
            )
        most_open = None
        if max_waiting is not None:
            most_open = num_slots + _limit("max_waiting", max_waiting, 0, None)
        return cls(longest, longest_prompt, num_slots, most_open)


def _limit(name: str, value: int | None, least: int, most: int | None) -> int:
    """A limit of an open run, checked; the most there can be if it is not given."""
    if value is None and most is not None:
        return most
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"open_run() was given {name}={value!r:.60}; expected an integer of at least {least}"
        raise KVPolicyError(msg)
    return value if most is None else min(value, most)
