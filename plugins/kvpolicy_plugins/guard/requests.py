"""Prompts as requests for blocks: parts of as many tokens, named by all tokens up to their end.

So two prompts share a block where they share the prefix that ends with it, as in the prefix
caches of serving engines. A last part that fills no block is not stored, and not requested.
"""

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from random import Random

import attrs


@attrs.define
class BlockIds:
    """Numbers of blocks: the first that is asked for is 0, and so on.

    Attributes:
        block_size: Tokens of a block.
    """

    block_size: int
    _numbers: dict[bytes, int] = attrs.field(factory=dict, init=False)

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """The numbers of the full blocks of a prompt."""
        numbers = []
        digest = b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[start : start + self.block_size]
            digest = hashlib.sha256(digest + repr(list(block)).encode()).digest()
            numbers.append(self._numbers.setdefault(digest, len(self._numbers)))
        return numbers


def shared_parts(num_prompts: int, num_shared: int, exponent: float, rng: Random) -> Iterator[int]:
    """Which of some shared beginnings each prompt has: popular ones more often, and they change.

    The ranks of two beginnings are exchanged after every tenth prompt.

    Args:
        num_prompts: Prompts.
        num_shared: Beginnings.
        exponent: Of Zipf's distribution over them.
        rng: Where the draws come from.
    """
    order = list(range(num_shared))
    limits = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(num_shared)))
    for number in range(num_prompts):
        if number % 10 == 9:
            first, second = rng.randrange(num_shared), rng.randrange(num_shared)
            order[first], order[second] = order[second], order[first]
        yield order[bisect.bisect(limits, rng.random() * limits[-1])]


def interleaved(lengths: Sequence[int], num_open: int, rng: Random) -> Iterator[tuple[int, int]]:
    """Turns of conversations that take place at the same time.

    Args:
        lengths: Turns of each conversation.
        num_open: Conversations that go on at once; one that ends makes room for the next.
        rng: Draws whose turn it is.

    Yields:
        Numbers of a conversation and of its turn.
    """
    waiting = iter([(number, length) for number, length in enumerate(lengths) if length])
    going = [[number, 0, length] for number, length in itertools.islice(waiting, num_open)]
    while going:
        place = rng.randrange(len(going))
        number, turn, length = going[place]
        yield number, turn
        if turn + 1 < length:
            going[place][1] += 1
        elif (following := next(waiting, None)) is not None:
            going[place] = [following[0], 0, following[1]]
        else:
            del going[place]
