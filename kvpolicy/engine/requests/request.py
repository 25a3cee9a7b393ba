"""Requests: a prompt, its limits, its sampling and its stop conditions."""

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from attrs.validators import optional
from torch import Tensor

from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import KVPolicyError, shown
from kvpolicy.validators import MAX_COUNT, MAX_SEED, positive_int

DEFAULT_LENGTH = 1024  # tokens, for models whose generation config has no length


def default_length(model: Any) -> int:
    """The most tokens to generate if the user of a command gives no limit: the model's, or 1024."""
    generation = getattr(model, "generation_config", None)
    return getattr(generation, "max_new_tokens", None) or DEFAULT_LENGTH


def _number_where(
    is_valid: Callable[[float], bool], expected: str
) -> Callable[[object, Any, float], None]:
    def check(instance: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not is_valid(value):
            msg = (
                f"{type(instance).__name__} was given {attribute.name}={value!r:.60}; "
                f"expected {expected}"
            )
            raise KVPolicyError(msg)

    return check


_number = _number_where(lambda value: abs(value) <= sys.float_info.max, "a number")
_from_zero = _number_where(lambda value: 0 <= value <= sys.float_info.max, "a number of at least 0")
_positive = _number_where(lambda value: 0 < value <= sys.float_info.max, "a number above 0")
_share = _number_where(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _integer(least: int, most: int = MAX_COUNT) -> Callable[[object, Any, Any], None]:
    def check(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        try:
            positive_int(value, least=least, most=most)
        except TypeError as error:
            msg = (
                f"{type(instance).__name__} was given {attribute.name}={value!r:.60}; "
                f"expected an integer from {least:,} to {most:,}"
            )
            raise KVPolicyError(msg) from error

    return check


def _pairs(
    bias: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    """Token ids with what is added to their logits, in order."""
    try:
        pairs = dict(bias)
        found = sorted((operator.index(token), float(value)) for token, value in pairs.items())
        if any(token < 0 or not math.isfinite(value) for token, value in found):
            raise ValueError
    except (TypeError, ValueError):
        msg = (
            f"Sampling was given logit_bias={bias!r:.60}; expected finite numbers by token id, "
            "such as {17: -2.5}"
        )
        raise KVPolicyError(msg) from None
    return tuple(found)


def _probability(instance: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        msg = (
            f"{type(instance).__name__} was given {attribute.name}={value!r}; "
            "expected a probability above 0 and up to 1"
        )
        raise KVPolicyError(msg)


@attrs.frozen
class Sampling:
    """How the next token is sampled from the logits.

    Attributes:
        temperature: Divides the logits; 0 means greedy, and of the other fields only the
            penalties and ``logit_bias`` have an effect.
        top_k: Sample among the k likeliest tokens only; 0 means all. Of tokens with equal logits,
            those with smaller ids count as likelier.
        top_p: Sample among the smallest set of tokens with at least this probability only.
        seed: Seed of the random numbers, each of which depends on it and on the position of the
            token only. So samples do not depend on the rest of the batch, requests with equal
            prompts and seeds get equal tokens, and a text can be continued from any token.
        min_p: Sample among tokens with at least this share of the likeliest token's probability
            only; 0 means all.
        repetition_penalty: Logits of tokens that the sequence holds are divided by it if they are
            positive, else multiplied; 1 means no penalty, ``None`` that of the model's generation
            config.
        frequency_penalty: Taken from the logit of a token for each time that the answer has it, as
            in OpenAI's interface; below 0, it is made likelier.
        presence_penalty: Taken once from the logits of all tokens that the answer has.
        logit_bias: Added to the logits of some tokens, by their ids: a mapping, or pairs. A
            request with an id that the model does not have is refused.
    """

    temperature: float = attrs.field(default=0.0, validator=_from_zero)
    top_k: int = attrs.field(default=0, validator=_integer(0))
    top_p: float = attrs.field(default=1.0, validator=_probability)
    seed: int = attrs.field(default=0, validator=_integer(0, MAX_SEED))
    min_p: float = attrs.field(default=0.0, validator=_share, kw_only=True)
    repetition_penalty: float | None = attrs.field(
        default=None, validator=optional(_positive), kw_only=True
    )
    frequency_penalty: float = attrs.field(default=0.0, validator=_number, kw_only=True)
    presence_penalty: float = attrs.field(default=0.0, validator=_number, kw_only=True)
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(
        default=(), converter=_pairs, kw_only=True
    )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def samplings_of(sampling: object, num_prompts: int) -> list[Sampling]:
    """One `Sampling` for each prompt; `KVPolicyError` if they are missing or of another type."""
    one_for_all = isinstance(sampling, (Sampling, str)) or not isinstance(sampling, Iterable)
    given: list[Any] = [sampling] * num_prompts if one_for_all else list(sampling)  # type: ignore[call-overload]
    samplings = [one for one in given if isinstance(one, Sampling)]
    if len(samplings) < len(given):
        wrong = next(one for one in given if not isinstance(one, Sampling))
        msg = f"sampling was given as {wrong!r:.60}; write Sampling(temperature=0.7)"
        raise KVPolicyError(msg)
    if len(samplings) != num_prompts:
        msg = f"{len(samplings)} samplings were given for {num_prompts} prompts; give one for each"
        raise KVPolicyError(msg)
    return samplings


def _texts(stop: str | Iterable[str]) -> tuple[str, ...]:
    """One text or several; an empty text is an error, it would end every generation."""
    texts = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    for text in texts:
        if not isinstance(text, str) or not text:
            msg = f"stop strings were given as {texts!r:.60}; expected non-empty texts"
            raise KVPolicyError(msg)
    return texts


def _ids(stop_ids: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """One token id or several."""
    if stop_ids is None:
        return None
    ids = tuple(stop_ids) if isinstance(stop_ids, Iterable) else (stop_ids,)
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        msg = f"stop_ids were given as {ids!r:.60}; expected integer token ids"
        raise KVPolicyError(msg) from None


def _is_sampling(instance: object, attribute: object, value: object) -> None:
    samplings_of([value], 1)


def _is_snapshot(instance: object, attribute: object, value: Any) -> None:
    if value is not None and not isinstance(value, SequenceSnapshot):
        msg = (
            f"resume was given as {shown(value)}; give a snapshot, as of Result.snapshot or "
            "SequenceSnapshot.load(FILE)"
        )
        raise KVPolicyError(msg)


# What a processor returns of the tokens, which are given as the prompt.
_OF_TOKENS = ("input_ids", "attention_mask")


def _image_tensors(images: Any) -> dict[str, Tensor] | None:
    """Tensors by the name of an argument of the model's forward; ``None``: there are none."""
    if images is None:
        return None
    is_mapping = isinstance(images, Mapping)
    found = (
        {name: one for name, one in images.items() if name not in _OF_TOKENS} if is_mapping else {}
    )
    if not found or not all(isinstance(one, Tensor) for one in found.values()):
        msg = (
            f"images were given as {shown(images)}; give the tensors that the model's processor "
            "returns beside input_ids, by their names"
        )
        raise KVPolicyError(msg)
    return found


@attrs.frozen(eq=False)
class _Contents:
    """Tensors by name, equal to others of the same names and numbers."""

    tensors: Mapping[str, Tensor]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Contents) or self.tensors.keys() != other.tensors.keys():
            return False
        pairs = ((one, other.tensors[name]) for name, one in self.tensors.items())
        return all(
            one is two or (one.dtype == two.dtype and torch.equal(one.cpu(), two.cpu()))
            for one, two in pairs
        )

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, one.shape) for name, one in self.tensors.items())))


@attrs.frozen
class Request:
    """One prompt and how to continue it.

    Attributes:
        prompt: Text (the engine needs a tokenizer then) or token ids. With ``resume``, what follows
            the snapshot: a text gets no first token of its own then, and no space in front. Empty:
            the newest answer of the snapshot goes on, and the texts of both join to that of the
            whole.
        max_new_tokens: The most tokens to generate.
        sampling: How tokens are drawn.
        stop: Texts that end the generation; the text of the result ends before the first of them.
            They are found whatever tokens they are made of, and may be or have special tokens.
            None are given: those of the model's generation config, which hardly ever has any.
        stop_ids: Tokens that end the generation; ``None`` means the model's own.
        min_new_tokens: Tokens of the answer before which ``stop_ids`` are not drawn; ``None``:
            as the model's generation config says.
        resume: The sequence to go on with; ``None``: a new one.
        snapshot: Whether `Result.snapshot` is wanted.
        priority: Requests of higher priority get a slot first, equal ones in order of arrival.
            No request gives up its slot for another.
        deadline_s: Seconds from its submission after which the request ends, whether it waits or
            runs; ``None``: it has no deadline. It is checked before every step.
        logprobs: Asks for `Result.logprobs`: the log-probability of each token, and those of so
            many of the likeliest tokens at its place. ``None``: not wanted.
        prompt_logprobs: Asks for `Result.prompt_logprobs` likewise; refused where the plan evicts
            rows of as many tokens, as they are computed before rows are evicted.
        include_stop: Whether the text of the result has the stop string that has ended it.
        images: What the model's processor returns beside ``input_ids`` for a prompt with images, by
            name, such as ``pixel_values``; the prompt is these ``input_ids``, of one row. Tokens of
            images without images are embedded as any others, as in `generate`.
    """

    prompt: str | Sequence[int] = ()
    max_new_tokens: int = attrs.field(default=256, validator=_integer(1))
    sampling: Sampling = attrs.field(default=Sampling(), validator=_is_sampling)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    stop_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_ids)
    min_new_tokens: int | None = attrs.field(
        default=None, validator=optional(_integer(0)), kw_only=True
    )
    resume: SequenceSnapshot | None = attrs.field(
        default=None, validator=_is_snapshot, kw_only=True
    )
    snapshot: bool = attrs.field(default=False, kw_only=True)
    priority: int = attrs.field(default=0, validator=_integer(-MAX_COUNT), kw_only=True)
    deadline_s: float | None = attrs.field(
        default=None, validator=optional(_from_zero), kw_only=True
    )
    logprobs: int | None = attrs.field(default=None, validator=optional(_integer(0)), kw_only=True)
    prompt_logprobs: int | None = attrs.field(
        default=None, validator=optional(_integer(0)), kw_only=True
    )
    include_stop: bool = attrs.field(default=False, kw_only=True)
    images: Mapping[str, Tensor] | None = attrs.field(
        default=None,
        converter=_image_tensors,
        kw_only=True,
        eq=lambda images: images and _Contents(images),
        repr=False,
    )

    @property
    def goes_on(self) -> bool:
        """Whether the newest answer of the snapshot goes on."""
        is_empty = isinstance(self.prompt, (str, list, tuple)) and not self.prompt
        return self.resume is not None and is_empty

    @property
    def continued(self) -> Sequence[int]:
        """Tokens of the answer that goes on."""
        return self.resume.tokens if self.resume is not None and self.goes_on else ()
