"""SkipKV's state of one sequence: sentences, redundant ones, and non-execution thoughts."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from skipkv_plugin.redundancy import Pair, SentenceVectors, redundant
from skipkv_plugin.sentences import Segmenter
from skipkv_plugin.steering import KeywordMatch, is_non_execution


@attrs.define(kw_only=True)
class SequenceState:
    """State of one sequence, shared by all layers and heads.

    Attributes:
        segmenter: Divides the sequence into sentences.
        prompt_len: Tokens of the prompt.
        tokenizer: The engine's tokenizer, or ``None``.
        tau: Cosine similarity above which the earlier of two sentences is redundant.
        pair: Which later sentence's similarity counts.
        keywords: Words of non-execution sentences; empty if they need not be counted.
        keyword_match: How keywords are matched.
        vectors: Mean hidden state of every sentence.
        similarities: Similarity of the redundant sentences by number; entries are never removed
            (SkipKV, eq. 7).
        num_non_execution: Number of generated non-execution sentences so far.
    """

    segmenter: Segmenter
    prompt_len: int
    tokenizer: Any
    tau: float
    pair: Pair
    keywords: Sequence[str]
    keyword_match: KeywordMatch
    vectors: SentenceVectors = attrs.field(factory=SentenceVectors)
    similarities: dict[int, float] = attrs.field(factory=dict)
    num_non_execution: int = 0
    _penalty: Tensor | None = None  # by position, [seq_len so far + 1], 0 at the end

    def feed(self, token_ids: Sequence[int], hidden_states: Tensor, start: int) -> None:
        """Process the next tokens, ``[L]``, and their last hidden states, ``[L, M]``."""
        finished = self.segmenter.feed(token_ids)
        sentences = [sentence for sentence, _ in finished]
        num_new = self.vectors.feed(hidden_states, start, sentences, self.segmenter.begin)
        if num_new and self.vectors.vectors is not None:
            found = redundant(self.vectors.vectors, num_new, self.tau, self.pair)
            self._add_similarities(found)
        self._penalty = self._penalties(hidden_states.device)
        self.num_non_execution += sum(
            is_non_execution(ids, self.tokenizer, self.keywords, self.keyword_match)
            for sentence, ids in finished
            if sentence.begin >= self.prompt_len
        )

    def penalty_at(self, positions: Tensor) -> Tensor:
        """Similarity of the redundant sentence that contains each row's token, else 0.

        Args:
            positions: ``[H_kv, T]``.

        Returns:
            ``[H_kv, T]``, fp32.
        """
        if self._penalty is None:
            return torch.zeros(positions.shape, device=positions.device)
        penalty = self._penalty.to(positions.device)
        return penalty[positions.clamp(max=len(penalty) - 1)]

    def _add_similarities(self, found: dict[int, float]) -> None:
        for number, similarity in found.items():
            known = self.similarities.get(number, -1.0)
            self.similarities[number] = max(known, similarity) if self.pair == "max" else similarity

    def _penalties(self, device: torch.device) -> Tensor:
        sentences = self.segmenter.sentences
        penalty = torch.zeros(sentences[-1].end + 1 if sentences else 1)
        for number, similarity in self.similarities.items():
            sentence = sentences[number]
            # A sentence of one token is a delimiter that was not merged; the code skips it.
            if sentence.end - sentence.begin > 1:
                penalty[sentence.begin : sentence.end] = similarity
        return penalty.to(device)
