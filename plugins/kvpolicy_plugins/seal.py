"""SEAL: steer hidden states towards execution thoughts at paragraph ends."""

import math
from typing import Any, ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of, min_len, optional
from torch import Tensor

from kvpolicy import Registers, hookimpl
from kvpolicy.toolkit import Paragraphs, SteeringVector, load_hashed, steering_change, with_hash


def _as_tags(value: Any) -> Any:
    return tuple(value or ()) if isinstance(value, (list, tuple, type(None))) else value


def _as_float(value: object) -> object:
    return float(value) if type(value) is int else value


def _finite(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not math.isfinite(value):
        msg = f"'{attribute.name}' must be a finite number, and is {value}"
        raise ValueError(msg)


def _two_or_none(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    has_length = isinstance(value, tuple) and len(value) in (0, 2)
    if not has_length or not all(isinstance(tag, str) and tag for tag in value):
        msg = f"'{attribute.name}' must be two texts, or none: {value!r}"
        raise ValueError(msg)


@attrs.define(eq=False, kw_only=True)
class Seal:
    r"""SEAL: steer towards execution thoughts where a paragraph of the thinking ends.

    Chen et al., "SEAL: Steerable Reasoning Calibration of Large Language Models for Free", 2025
    (arXiv 2504.07986); code at VITA-Group/SEAL, first public commit. Evicts no rows: alone it is
    the full cache with steering; ``["rkv", "seal"]`` adds steering to R-KV.

    In each decode step, for each sequence inside ``<think>...</think>`` whose last token
    contains ``"\n\n"``: ``h <- h + strength * vector``, where h enters decoder layer
    ``layer``. The prompt is not steered.

    Deviations: the vector is execution - non-execution and the strength is positive, where the
    authors store the opposite and multiply it by -1; the product is computed in fp32.

    Attributes:
        vector: Name of an installed file of steering vectors, or path of one made by
            ``kvpolicy steer calibrate`` for the model; a hash of the contents is added to it.
        layer: Layer whose input is steered with its vector; ``None``: the file's default or
            only one.
        strength: Factor of the vector (SEAL's alpha: 1.0); 0 changes nothing.
        delimiter: Text inside the tokens that end a paragraph.
        think: Tokens that open and close the thinking part; empty if all text is thinking.
    """

    registers: ClassVar[tuple[str, ...]] = ("inside", "strength")

    vector: str = attrs.field(default="reasoner", converter=with_hash, validator=instance_of(str))
    layer: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(0)]))
    strength: float = attrs.field(
        default=1.0, converter=_as_float, validator=[instance_of(float), _finite]
    )
    delimiter: str = attrs.field(default="\n\n", validator=[instance_of(str), min_len(1)])
    think: tuple[str, ...] = attrs.field(
        default=("<think>", "</think>"), converter=_as_tags, validator=_two_or_none
    )
    _direction: SteeringVector = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._direction = load_hashed(self.vector, self.layer)

    @property
    def steers(self) -> tuple[int, ...]:
        """The layer of the vector."""
        return (self._direction.layer,)

    @property
    def no_effect(self) -> str | None:
        """Nothing is added with strength 0."""
        return "its strength is 0" if self.strength == 0 else None

    @hookimpl
    def observe(
        self, token_ids: Tensor, start: int, prompt_len: int, tokenizer: Any, registers: Registers
    ) -> None:
        """Find out whether thinking is open after the prompt; `steer` follows later tokens."""
        if start >= prompt_len:
            return
        own = registers.of(self)
        was_inside = bool(own["inside"])
        is_inside = self._paragraphs(tokenizer).thinking_after(token_ids, was_inside)
        own["inside"].fill_(float(is_inside))
        own["strength"].fill_(self.strength)

    @hookimpl
    def steer(
        self, hidden_states: Tensor, token_ids: Tensor, tokenizer: Any, registers: Registers
    ) -> Tensor:
        """Add the vector to sequences whose paragraph has just ended."""
        return steering_change(
            self._direction.entering(hidden_states),
            self._paragraphs(tokenizer, hidden_states.device),
            hidden_states,
            token_ids,
            **registers.of(self),
        )

    def _paragraphs(self, tokenizer: Any, device: torch.device | None = None) -> Paragraphs:
        think = (self.think[0], self.think[1]) if self.think else None
        return Paragraphs.of(tokenizer, delimiter=self.delimiter, think=think, device=device)
