"""From the new tokens of a batch to the forwards that bring them in."""

from collections.abc import Sequence

from kvpolicy.engine.batch import OnTokens, RunningBatch
from kvpolicy.engine.feed import Feeds
from kvpolicy.engine.request import Request
from kvpolicy.engine.sequence import LiveSequence


def turn_feeds(slots: RunningBatch, new: Sequence[Sequence[int]], take: OnTokens) -> Feeds:
    """The forwards that bring in new tokens: a prompt, one more token each, or another turn."""
    if not slots.active:
        slots.admit([_sequence(row, tokens) for row, tokens in enumerate(new)])
        return slots.feeds(take)
    is_turn = any(len(tokens) > 1 for tokens in new)
    for served in slots.active:
        if is_turn:
            # All that came before a turn is prompt to it: policies that are asked when the
            # prompt is in are asked again.
            served.prompt = (*served.prompt, *served.tokens, *new[served.id])
            served.tokens = []
        else:
            served.tokens.append(*new[served.id])
    return slots.feeds(take) if is_turn else slots.decode_feeds(take)


def _sequence(row: int, prompt: Sequence[int]) -> LiveSequence:
    """A row of the batch; `generate` knows when it ends, and draws its tokens."""
    return LiveSequence(row, Request(prompt), tuple(prompt), 0, frozenset())
