"""SkipKV: evict repeated sentences first, and steer away from non-execution thoughts."""

from collections.abc import Generator
from typing import Any, ClassVar

import attrs
import torch
from attrs.validators import ge, gt, in_, instance_of, le, min_len, optional
from torch import Tensor

from kvpolicy import Memory, Registers, hookimpl
from kvpolicy.toolkit import (
    Paragraphs,
    SteeringVector,
    key_redundancy,
    load_hashed,
    odd,
    steering_change,
    window_scores,
    with_hash,
)
from skipkv_plugin.redundancy import Pair
from skipkv_plugin.sentences import Delimiters, Match, Segmenter
from skipkv_plugin.state import SequenceState
from skipkv_plugin.steering import ThinkInPrompt, strength, thinking_after_prompt

_number = instance_of((int, float))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _tags(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """Validate tags: an opening and a closing one, or none."""
    if len(value) not in (0, 2) or not all(isinstance(one, str) and one for one in value):
        msg = f"'{attribute.name}' must be two texts, or none: {list(value)}"
        raise ValueError(msg)


def _texts_or_ids(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """Validate delimiters: texts that are not empty, or token ids; at least one."""
    good = all(isinstance(one, (str, int)) and one != "" for one in value)
    if not value or not good or any(isinstance(one, bool) for one in value):
        msg = f"'{attribute.name}' must be texts or token ids: {list(value)}"
        raise ValueError(msg)


@attrs.define(eq=False, kw_only=True)
class SkipKV:
    """SkipKV: evict repeated sentences first, then tokens as R-KV does.

    SkipKV, MLSys 2026 (arXiv 2512.07993), sections 4.1 and 4.2; code at TTTTTTris/SkipKV
    4492840. A sentence is redundant when the mean of its last hidden states is more similar
    than ``tau`` to that of a later one (eqs. 1-3). Rows score as in R-KV, by importance and
    redundancy of keys (eqs. 4 and 5), minus the similarity if their sentence is redundant
    (eq. 6), so that redundant sentences leave before any other token. Listed after a policy
    that scores, as in ``["h2o", "skipkv"]``, it uses that score instead of R-KV's.

    Deviations, with the knob that reverts each, if any: of several similar later
    sentences the most similar counts (``pair``); consecutive delimiters end one sentence
    (``merge_delimiters``); delimiters and keywords are matched as text (``delimiter_match``,
    ``keyword_match``); the strength is bounded (``alpha_max``) and counts generated sentences
    only (``count_prompt``); a sentence counts as soon as it has ended
    (``late_similarities``); thinking is open if the prompt's last tag says so
    (``think_in_prompt``); the prompt is not steered; sentences are found by position, so there
    is no span map to recompute; pads are never stored; a sequence is compacted when its own
    buffer is full; base scores larger than half of ``tau`` are scaled down to it, so that
    sentences come first with any base score. The plan ``skipkv-code`` sets all of these knobs
    as in the code; the README of this package has details.

    Attributes:
        tau: Cosine similarity above which the earlier of two sentences is redundant.
        mix_lambda: Weight of the importance in the token score; the redundancy weighs
            ``1 - mix_lambda``.
        window_size: Most recent queries that give the importance; their rows always stay.
        kernel_size: Rows whose importance is pooled together, odd.
        similarity_threshold: Cosine similarity above which two keys count as similar.
        delimiters: Delimiters of sentences: texts, or token ids.
        delimiter_match: ``"text"``, or ``"ids"``: the last token of each delimiter's encoding,
            whatever stands before it, as the code does.
        merge_delimiters: Whether consecutive delimiters end one sentence.
        pair: Which later sentence's similarity counts, ``"max"`` or ``"last"``.
        late_similarities: Whether a sentence that ends with the newest token is compared at the
            next compaction only, as in the code.
        protect_prompt: Whether the prompt's rows always stay, as long as they fit.
        vector: Steering vectors, a file or an installed name, to which a hash of the contents is
            added; ``None`` means no steering.
        layer: Layer whose input is steered, from 0; ``None`` means the default of the file.
        alpha_0: Initial strength of the steering.
        gamma: Increase of the strength for every non-execution sentence.
        alpha_max: Upper bound of the strength; 0 means no bound.
        keywords: Words that mark a non-execution sentence.
        keyword_match: ``"text"``, as whole words, or ``"ids"``, as the code does.
        count_prompt: Whether the first keyword of the prompt counts as a non-execution sentence,
            as in the code.
        delimiter: Text inside the tokens at which the model is steered.
        think: Tokens between which it is steered; empty for models without such tokens.
        think_in_prompt: ``"last"``: the last of these tokens in the prompt decides whether
            thinking is open; ``"any"``: any opening one opens it, as in the code.
    """

    registers: ClassVar[tuple[str, ...]] = ("inside", "strength")

    tau: float = attrs.field(default=0.95, validator=[_number, gt(0), le(1)])
    mix_lambda: float = attrs.field(default=0.1, validator=[_number, ge(0), le(1)])
    window_size: int = attrs.field(default=8, validator=[instance_of(int), ge(1)])
    kernel_size: int = attrs.field(default=7, validator=[instance_of(int), ge(1), odd])
    similarity_threshold: float = attrs.field(default=0.5, validator=[_number, ge(-1), le(1)])
    delimiters: tuple[str | int, ...] = attrs.field(
        default=("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", "?\n\n"),
        converter=_as_tuple,
        validator=_texts_or_ids,
    )
    delimiter_match: Match = attrs.field(default="text", validator=in_(["text", "ids"]))
    merge_delimiters: bool = attrs.field(default=True, validator=instance_of(bool))
    pair: Pair = attrs.field(default="max", validator=in_(["max", "last"]))
    late_similarities: bool = attrs.field(default=False, validator=instance_of(bool))
    protect_prompt: bool = attrs.field(default=False, validator=instance_of(bool))
    vector: str | None = attrs.field(
        default=None, validator=optional(instance_of(str)), converter=with_hash
    )
    layer: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(0)]))
    alpha_0: float = attrs.field(default=1.0, validator=_number)
    gamma: float = attrs.field(default=0.02, validator=_number)
    alpha_max: float = attrs.field(default=2.0, validator=[_number, ge(0)])
    keywords: tuple[str, ...] = attrs.field(
        default=("Wait", "Alternatively", "again"), converter=_as_tuple
    )
    keyword_match: Match = attrs.field(default="text", validator=in_(["text", "ids"]))
    count_prompt: bool = attrs.field(default=False, validator=instance_of(bool))
    delimiter: str = attrs.field(default="\n\n", validator=[instance_of(str), min_len(1)])
    think: tuple[str, ...] = attrs.field(
        default=("<think>", "</think>"), converter=_as_tuple, validator=_tags
    )
    think_in_prompt: ThinkInPrompt = attrs.field(default="last", validator=in_(["last", "any"]))
    _direction: SteeringVector | None = attrs.field(init=False, repr=False)

    @_direction.default
    def _load(self) -> SteeringVector | None:
        return None if self.vector is None else load_hashed(self.vector, self.layer)

    @property
    def protects(self) -> tuple[int, int]:
        """The rows of the window."""
        return 0, self.window_size

    @property
    def steers(self) -> tuple[int, ...]:
        """The layer of the vector, if there is one."""
        return () if self._direction is None else (self._direction.layer,)

    @hookimpl
    def observe(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        start: int,
        prompt_len: int,
        tokenizer: Any,
        registers: Registers,
        memory: Memory,
    ) -> None:
        """Find the sentences that have ended and the earlier ones that they repeat."""
        (own,) = memory.of(self)
        if "state" not in own:
            own["state"] = self._new_state(tokenizer, prompt_len)
        state: SequenceState = own["state"]
        if start < state.prompt_len:
            state.prompt_len = prompt_len  # that of another prompt, if its beginning was reused
        state.feed(token_ids.tolist(), hidden_states, start)
        if self._direction is None:
            return
        register = registers.of(self)
        if start < prompt_len:
            inside = thinking_after_prompt(
                self._paragraphs(tokenizer),
                token_ids,
                bool(register["inside"]),
                which=self.think_in_prompt,
                is_end=start + len(token_ids) >= prompt_len,
            )
            register["inside"].fill_(inside)
        alpha = strength(
            state.num_non_execution,
            alpha_0=self.alpha_0,
            gamma=self.gamma,
            alpha_max=self.alpha_max,
        )
        register["strength"].fill_(alpha)

    def pack_memory(self, memory: dict[str, Any]) -> dict[str, Any]:
        """The state of a sequence as plain data."""
        return memory["state"].pack() if "state" in memory else {}

    def unpack_memory(self, packed: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """The memory that was packed."""
        if not packed:
            return {}
        state = self._new_state(tokenizer, packed["prompt_len"])
        state.unpack(packed)
        return {"state": state}

    def _new_state(self, tokenizer: Any, prompt_len: int) -> SequenceState:
        delimiters = Delimiters.of(self.delimiters, tokenizer, self.delimiter_match)
        return SequenceState(
            segmenter=Segmenter(delimiters, self.merge_delimiters),
            prompt_len=prompt_len,
            tokenizer=tokenizer,
            tau=self.tau,
            pair=self.pair,
            keywords=self.keywords if self.vector is not None else (),
            keyword_match=self.keyword_match,
            count_prompt=self.count_prompt,
            late_similarities=self.late_similarities,
        )

    @hookimpl(when="vector")
    def steer(
        self, hidden_states: Tensor, token_ids: Tensor, tokenizer: Any, registers: Registers
    ) -> Tensor:
        """Add the vector at the end of a paragraph of thinking (section 4.2)."""
        assert self._direction is not None
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

    @hookimpl(when="protect_prompt")
    def protect(self, positions: Tensor, memory: Memory) -> Tensor:
        """Protect the prompt."""
        states = [own.get("state") for own in memory.of(self)]
        prompt_len = [0 if state is None else state.prompt_len for state in states]
        ends = torch.tensor(prompt_len).to(positions.device, non_blocking=True)
        return positions < ends[:, None, None]

    @hookimpl(specname="score", trylast=True)
    def token_score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Mix importance and redundancy as R-KV does, in order of position."""
        queries = queries[:, :, -self.window_size :]
        importance = window_scores(queries, keys, kernel_size=self.kernel_size)
        redundancy = key_redundancy(keys, threshold=self.similarity_threshold)
        return self.mix_lambda * importance - (1 - self.mix_lambda) * redundancy

    @hookimpl(wrapper=True)
    def score(
        self, positions: Tensor, protected: Tensor, memory: Memory
    ) -> Generator[None, Tensor, Tensor]:
        """Score the rows of redundant sentences below all others (eq. 6)."""
        scores = scale_down((yield).float(), self.tau / 2, protected)
        states = [own.get("state") for own in memory.of(self)]
        penalty = torch.stack(
            [
                torch.zeros_like(scores[b]) if state is None else state.penalty_at(positions[b])
                for b, state in enumerate(states)
            ]
        )
        return scores - penalty


def scale_down(scores: Tensor, bound: float, protected: Tensor) -> Tensor:
    """Scale the scores of each head down to a bound, if one of a row that may leave exceeds it.

    Args:
        scores: ``[B, H_kv, T]``; infinite ones stay as they are.
        bound: The largest magnitude that a finite score may have.
        protected: Rows whose scores may exceed it, bool ``[B, H_kv, T]``.
    """
    largest = scores.abs().masked_fill(scores.isinf() | protected, 0).amax(dim=2, keepdim=True)
    return scores * (bound / largest.clamp(min=bound))
