"""SEAL: hidden states are pushed towards execution at the paragraph ends of a thinking model."""

import math
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, instance_of, min_len, optional
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.registers import Registers
from kvpolicy.toolkit.paragraphs import Paragraphs, steering_change
from kvpolicy.toolkit.pinned import load_pinned, pin
from kvpolicy.toolkit.steering_vectors import SteeringVector


def _tags(value: Any) -> Any:
    return tuple(value or ()) if isinstance(value, (list, tuple, type(None))) else value


def _number(value: object) -> object:
    return float(value) if type(value) is int else value


def _finite(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not math.isfinite(value):
        msg = f"'{attribute.name}' must be a finite number, and is {value}"
        raise ValueError(msg)


def _pair(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    is_one = isinstance(value, tuple) and len(value) in (0, 2)
    if not is_one or not all(isinstance(tag, str) and tag for tag in value):
        msg = f"'{attribute.name}' must be two texts, or none: {value!r}"
        raise ValueError(msg)


def _pinned(value: Any) -> Any:
    return pin(value) if isinstance(value, str) else value


@attrs.define(eq=False, kw_only=True)
class Seal:
    r"""SEAL: where a paragraph of the thinking ends, the model is steered to go on, not back.

    Chen et al., "SEAL: Steerable Reasoning Calibration of Large Language Models for Free", 2025
    (arXiv 2504.07986); code at VITA-Group/SEAL, first public commit. Keeps every row and evicts
    none: alone it is the full cache with steering; ``["rkv", "seal"]`` steers under R-KV.

    In each decode step, for each sequence that is inside ``<think>...</think>`` and whose token
    just read contains ``"\n\n"``: ``h <- h + strength * vector``, h being what enters decoder
    layer ``layer``. Nothing else is changed, and nothing in the prompt.

    Deviations: the vector is execution - non-execution and the strength positive, where the
    authors store the opposite and multiply it by -1; the product is formed in fp32.

    Attributes:
        vector: Name of a bundled file of steering vectors, or path of one made by
            ``kvpolicy steer calibrate`` for the model that is run; a hash of the contents is
            added to it.
        layer: Which of its vectors, and so which layer's input is changed; ``None``: the file's
            default or only one.
        strength: What the vector is multiplied with (SEAL's alpha: 1.0); 0 changes nothing.
        delimiter: Text within the tokens that end a paragraph.
        think: Tokens that open and close the thinking part; none at all if all of the text is
            thinking.
    """

    registers: ClassVar[tuple[str, ...]] = ("inside", "strength")

    vector: str = attrs.field(default="reasoner", converter=_pinned, validator=instance_of(str))
    layer: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(0)]))
    strength: float = attrs.field(
        default=1.0, converter=_number, validator=[instance_of(float), _finite]
    )
    delimiter: str = attrs.field(default="\n\n", validator=[instance_of(str), min_len(1)])
    think: tuple[str, ...] = attrs.field(
        default=("<think>", "</think>"), converter=_tags, validator=_pair
    )
    _direction: SteeringVector = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._direction = load_pinned(self.vector, self.layer)

    @property
    def steers(self) -> tuple[int, ...]:
        """The layer of the vector."""
        return (self._direction.layer,)

    @hookimpl
    def observe(
        self, token_ids: Tensor, start: int, prompt_len: int, tokenizer: Any, registers: Registers
    ) -> None:
        """Find out whether the prompt leaves thinking open; later tokens are seen by `steer`."""
        if start >= prompt_len:
            return
        mine = registers.of(self)
        was_inside = bool(mine["inside"])
        is_inside = self._paragraphs(tokenizer).thinking_after(token_ids, was_inside)
        mine["inside"].fill_(float(is_inside))
        mine["strength"].fill_(self.strength)

    @hookimpl
    def steer(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        token_ids: Tensor,
        tokenizer: Any,
        registers: Registers,
    ) -> Tensor | None:
        """Push the sequences whose paragraph has just ended."""
        vector = self._direction.entering(hidden_states)  # in every layer: is it of this model?
        if layer_idx != self._direction.layer:
            return None
        mine = registers.of(self)
        return steering_change(
            vector,
            self._paragraphs(tokenizer, hidden_states),
            hidden_states,
            token_ids,
            mine["inside"],
            mine["strength"],
        )

    def _paragraphs(self, tokenizer: Any, like: Tensor | None = None) -> Paragraphs:
        think = (self.think[0], self.think[1]) if self.think else None
        device = None if like is None else like.device
        return Paragraphs.of(tokenizer, delimiter=self.delimiter, think=think, device=device)
