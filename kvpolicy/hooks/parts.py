"""Policies made of policies: what their parts answer, asked only when they want to know.

A policy that declares ``parts``, pairs of a name and a policy, is asked like any other and may
ask its parts in turn. They are policies of the stack in all but one respect: their scores go
to their owner, and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvpolicy.errors import PolicyLoadError

# What an owner does not pass on: there is one choice of rows, one way to do away with the
# others, and one order of admission.
_NOT_OF_A_PART = ("select", "evict", "schedule")


def parts_of(policy: object) -> Sequence[tuple[str, object]]:
    """The parts that a policy declares, by name; none, for most."""
    declared: Sequence[tuple[str, object]] = getattr(policy, "parts", ())
    return declared


def refusal(implemented: Callable[[str], bool]) -> str | None:
    """Why a policy cannot be a part of another, in words, or ``None`` if it can.

    Args:
        implemented: Whether the policy implements a hook.
    """
    for hook in _NOT_OF_A_PART:
        if implemented(hook):
            return f"implements {hook}(), which nobody asks a part; list it in the stack itself"
    if not implemented("score"):
        return "implements no score(), so there is nothing of it that could be a part"
    return None


class Parts:
    """The answers of parts to `score`, for the rows of one compaction."""

    def __init__(self, asks: Mapping[int, Sequence[Callable[[], Tensor]]]) -> None:
        # Keyed by identity, as memory is.
        self._asks = asks

    def of(self, policy: object) -> list[Tensor]:
        """What each of a policy's parts answers now, in order, ``[B, H_kv, T]``, fp32.

        Asked once for every call. The answers are checked as a stack's own are.

        Raises:
            PolicyLoadError: If the policy declares no ``parts``.
            HookError: If a part raises; the message names it and its owner.
            HookResultError: If the answer of a part breaks the contract.
        """
        asks = self._asks.get(id(policy))
        if not asks:
            msg = (
                f"{type(policy).__name__} asks its parts and declares none; give it an "
                'attribute parts, as in parts = [("NAME", policy)]'
            )
            raise PolicyLoadError(msg)
        return [ask() for ask in asks]
