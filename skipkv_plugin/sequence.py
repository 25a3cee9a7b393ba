"""What SkipKV knows of one sequence: its sentences, which of them are redundant, how it thinks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from skipkv_plugin.redundancy import SentenceVectors, redundant
from skipkv_plugin.sentences import Delimiters, Segmenter
from skipkv_plugin.steering import is_non_execution

if TYPE_CHECKING:
    from skipkv_plugin.policy import SkipKV


@attrs.define
class SequenceState:
    """The notes of one sequence, shared by all layers and heads.

    Attributes:
        policy: Its knobs.
        prompt_len: Tokens of the prompt.
        segmenter: The sentences.
        vectors: Their meaning.
        similarities: Of the redundant ones, by number; it only grows (SkipKV, eq. 7).
        num_non_execution: Generated sentences that check or doubt, so far.
    """

    policy: "SkipKV"
    prompt_len: int
    tokenizer: Any
    segmenter: Segmenter
    vectors: SentenceVectors = attrs.field(factory=SentenceVectors)
    similarities: dict[int, float] = attrs.field(factory=dict)
    num_non_execution: int = 0
    _penalty: Tensor | None = None  # by position, [seq_len so far + 1], 0 at the end

    @classmethod
    def begin(cls, policy: "SkipKV", tokenizer: Any, prompt_len: int) -> "SequenceState":
        """Start at the first token."""
        delimiters = Delimiters.of(policy.delimiters, tokenizer)
        return cls(policy, prompt_len, tokenizer, Segmenter(delimiters, policy.merge_delimiters))

    def feed(self, token_ids: Sequence[int], hidden_states: Tensor, start: int) -> None:
        """Take in the next tokens, ``[L]``, and their last hidden states, ``[L, M]``."""
        finished = self.segmenter.feed(token_ids)
        sentences = [sentence for sentence, _ in finished]
        num_new = self.vectors.feed(hidden_states, start, sentences, self.segmenter.begin)
        if num_new and self.vectors.vectors is not None:
            found = redundant(self.vectors.vectors, num_new, self.policy.tau, self.policy.pair)
            self._remember(found)
        self._penalty = self._penalties(hidden_states.device)
        if self.policy.vector is not None:
            self.num_non_execution += sum(
                self._is_non_execution(ids)
                for sentence, ids in finished
                if sentence.begin >= self.prompt_len
            )

    def _is_non_execution(self, token_ids: Sequence[int]) -> bool:
        policy = self.policy
        return is_non_execution(token_ids, self.tokenizer, policy.keywords, policy.keyword_match)

    def penalty_at(self, positions: Tensor) -> Tensor:
        """Similarity of the redundant sentence that each row's token is in, else 0.

        Args:
            positions: ``[H_kv, T]``.

        Returns:
            ``[H_kv, T]``, fp32.
        """
        if self._penalty is None:
            return torch.zeros(positions.shape, device=positions.device)
        penalty = self._penalty.to(positions.device)
        return penalty[positions.clamp(max=len(penalty) - 1)]

    def _remember(self, found: dict[int, float]) -> None:
        for number, similarity in found.items():
            known = self.similarities.get(number, -1.0)
            take_larger = self.policy.pair == "max"
            self.similarities[number] = max(known, similarity) if take_larger else similarity

    def _penalties(self, device: torch.device) -> Tensor:
        sentences = self.segmenter.sentences
        penalty = torch.zeros(sentences[-1].end + 1 if sentences else 1)
        for number, similarity in self.similarities.items():
            sentence = sentences[number]
            # A sentence of one token is a delimiter that was not merged: the code skips it.
            if sentence.end - sentence.begin > 1:
                penalty[sentence.begin : sentence.end] = similarity
        return penalty.to(device)
