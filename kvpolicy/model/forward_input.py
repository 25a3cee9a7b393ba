"""What one forward of the model is called with, and which one is under way.

The twin passes its modules the `ForwardInput`. Operators in a graph are given tensors only, and
rotary embeddings positions only, so they ask which forward is under way in their thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.model.embedded import EmbeddedPrompt
from kvpolicy.model.static_forward import StaticForward, static_forward

# Steers a layer: layer index and the states entering it, [B, M] -> a change to add, or None.
Steer = Callable[[int, Tensor], Tensor | None]

# Asks for annotations: layer index, states [N, M], keys and values [N, H_kv, D], positions [N] ->
# numbers [N, H_kv] by the name of a track.
AskAnnotations = Callable[[int, Tensor, Tensor, Tensor, Tensor], Mapping[str, Tensor]]

# Runs what computes a fused forward: that, the forward, token ids and positions -> its logits
# [B, 1, V] and hidden states [B, L, M].
RunFused = Callable[
    [Callable[..., Any], "ForwardInput", Sequence[Tensor]], tuple[Tensor, Tensor | None]
]


@attrs.frozen(eq=False)
class Annotating:
    """Who annotates the new rows of one forward.

    Attributes:
        ask: Asks the policies of a layer.
        tracks: For each layer that is asked in a static step, the tracks that may be annotated.
    """

    ask: AskAnnotations
    tracks: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict)


@attrs.define(eq=False)
class ForwardInput:
    """What one forward of the model is called with.

    Attributes:
        token_ids: New tokens of the slots that the step serves, ``[B, L]``, int64, padded on
            the left.
        step: Where their rows go. A `StaticStep` has the new tokens itself.
        steer: Changes the states entering the layers named in `ModelAdapter.add_hooks`.
        wants_states: Whether the last hidden states are wanted.
        fuses: Whether operators of an eager forward may be those of a recording, whose groups are
            one each: nothing of it but attention is asked for.
        run_fused: Runs that recording; ``None``: it is called.
        in_graph: Whether attention of an eager forward stores the new rows itself, as one operator.
        run: Runs a static step.
        draws: Whether a static step draws the next tokens and counts the new rows.
        wants_logits: Whether the logits after all new tokens are wanted.
        annotating: Annotates the new rows of the layers named in `ModelAdapter.add_hooks`.
        gives_positions: Whether an eager forward says where the tokens are; else the model counts.
        embedded: What enters the decoder for the new tokens of each sequence; ``None``: what the
            model makes of their ids.
        states: Hidden states after the final norm, ``[B, L, M]``, after the forward.
        logits: Logits after all new tokens, ``[B, L, V]``, after the forward.
        attention_input: What enters the attention of the layer under way, ``[B, L, M]``, if its
            rows are annotated.
        newest_layer: The layer that has stored its rows last; -1: none has.
    """

    token_ids: Tensor
    step: EagerStep | StaticStep
    steer: Steer | None = None
    wants_states: bool = False
    fuses: bool = False
    run_fused: RunFused | None = None
    in_graph: bool = False
    run: StaticForward = static_forward
    draws: bool = False
    wants_logits: bool = False
    annotating: Annotating | None = None
    gives_positions: bool = True
    embedded: Sequence[EmbeddedPrompt | None] | None = None
    states: Tensor | None = None
    logits: Tensor | None = None
    attention_input: Tensor | None = None
    newest_layer: int = -1


_UNDER_WAY: ContextVar[ForwardInput] = ContextVar("forward")


@contextmanager
def under_way(given: ForwardInput) -> Iterator[None]:
    """Make it the forward under way in a ``with`` block."""
    token = _UNDER_WAY.set(given)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def forward_under_way() -> ForwardInput:
    """The forward in which this is called."""
    return _UNDER_WAY.get()
