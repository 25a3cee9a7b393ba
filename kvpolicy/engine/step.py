"""A step is a value: which sequences one forward serves, with which tokens, and what came of it."""

from collections import abc
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.devices import Download
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.late_checks import Unsettled
from kvpolicy.model.embedded import EmbeddedPrompt
from kvpolicy.model.forward_input import Annotating, Steer

# Is shown the logits ``[B, V]`` after the newest token of each sequence of a step that draws, and
# the tokens drawn from them, ``[B]``, on the same device.
OnDrawn = abc.Callable[[abc.Sequence[Sequence], Tensor, Tensor], None]


@attrs.define(eq=False)
class Step:
    """One forward of the model.

    Its rows are provisional: they are facts once `Core.commit` has counted them. An eager step that
    is not committed leaves no trace; a static one that draws its tokens has counted on the device.

    Attributes:
        sequences: The sequences served, ``B``.
        tokens: New tokens of each.
        is_decode: Whether these are the newest generated tokens, one of each sequence; else chunks
            of prompts.
        completes: Whether nothing that is known follows the new tokens of a sequence, so that the
            token after them is drawn.
        totals: Tokens of each sequence once its prompt is in.
        is_static: Whether it is a decode step that keeps states itself.
        follows: Whether it follows a step of the same sequences whose tokens are not read: the
            newest are on the device only, and ``tokens`` is empty.
        draws: Whether the runner draws the tokens itself.
        num_left: Tokens that each sequence may have at least, that of this step included.
        wants_states: Whether somebody reads the last hidden states.
        wants_logits: Whether somebody reads the logits after all new tokens.
        steer: Is asked for changes to the states that enter some layers, in decode steps.
        annotating: Gives the new rows of some layers numbers.
        embedded: What enters the decoder for the new tokens of each sequence; ``None``: what the
            model makes of their ids.
        on_drawn: Are shown logits and the tokens drawn from them.
        runs_python: Whether something is called in the forward that a replayed graph leaves out.
        newest: The newest token of each sequence, ``[B]``, once the forward has begun; in static
            steps it changes from one to the next.
        checks: Answers of policies before the step whose values are checked when it is committed.
        is_counted: Whether its rows are counted, which they are before it is committed where the
            next step is launched before its tokens are read.
        error: Why a policy has failed within the forward; all its sequences end with it.
    """

    sequences: list[Sequence]
    tokens: list[list[int]]
    is_decode: bool
    completes: list[bool]
    totals: list[int]
    is_static: bool = False
    follows: bool = False
    draws: bool = False
    num_left: int = 1
    wants_states: bool = False
    wants_logits: bool = False
    steer: Steer | None = None
    annotating: Annotating | None = None
    embedded: abc.Sequence[EmbeddedPrompt | None] | None = None
    on_drawn: list[OnDrawn] = attrs.field(factory=list)
    runs_python: bool = False
    newest: Tensor = attrs.field(init=False)
    checks: Unsettled | None = None
    is_counted: bool = False
    error: str | None = None

    @property
    def slots(self) -> list[int]:
        """The slot of each sequence."""
        return [seq.slot for seq in self.sequences]

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence."""
        return [len(tokens) for tokens in self.tokens]

    def fail(self, error: str) -> None:
        """Note that a policy has failed; the first failure counts."""
        self.error = self.error or error


@attrs.define(eq=False)
class Output:
    """What a forward has computed.

    Attributes:
        logits: After the newest token of each sequence, ``[B, V]``.
        states: Last hidden states of the new tokens, ``[B, L, M]``, padded on the left; ``None``:
            not asked for.
        all_logits: After all new tokens, ``[B, L, V]``, padded on the left; ``None``: likewise.
        opened: The new rows.
        drawn: Tokens that the runner has drawn itself, of each sequence, on their way to the host;
            ``None``: it draws none.
    """

    logits: Tensor
    states: Tensor | None
    all_logits: Tensor | None
    opened: Any
    drawn: Download | None = None


@attrs.frozen(eq=False)
class Drawn:
    """The tokens that a step has drawn.

    Attributes:
        tokens: New tokens of each sequence: one, or none within a prompt. `NO_TOKEN` where the
            logits name none.
    """

    tokens: list[list[int]]
