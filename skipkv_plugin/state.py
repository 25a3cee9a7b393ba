"""SkipKV's state of one sequence: sentences, redundant ones, and non-execution thoughts."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from skipkv_plugin.redundancy import Pair, SentenceVectors, redundant
from skipkv_plugin.sentences import Match, Segmenter, Sentence
from skipkv_plugin.steering import is_non_execution

# Fields of a state that are no knobs.
_FOUND = (
    "prompt_len",
    "similarities",
    "num_non_execution",
    "_num_compared",
    "_prompt_is_labelled",
    "_penalty",
)


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
        count_prompt: Whether sentences of the prompt count: the first with a keyword.
        late_similarities: Whether a sentence that the newest token ends is compared later.
        vectors: Mean hidden state of every sentence.
        similarities: Similarity of the redundant sentences by number; entries are never removed
            (SkipKV, eq. 7).
        num_non_execution: Number of non-execution sentences so far.
    """

    segmenter: Segmenter
    prompt_len: int
    tokenizer: Any
    tau: float
    pair: Pair
    keywords: Sequence[str]
    keyword_match: Match
    count_prompt: bool = False
    late_similarities: bool = False
    vectors: SentenceVectors = attrs.field(factory=SentenceVectors)
    similarities: dict[int, float] = attrs.field(factory=dict)
    num_non_execution: int = 0
    _num_compared: int = 0  # sentences that have been compared with all before them
    _prompt_is_labelled: bool = False  # a keyword has been found in the prompt
    _penalty: Tensor | None = None  # by position, [seq_len so far + 1], 0 at the end

    def feed(self, token_ids: Sequence[int], hidden_states: Tensor, start: int) -> None:
        """Process the next tokens, ``[L]``, and their last hidden states, ``[L, M]``."""
        finished = self.segmenter.feed(token_ids)
        sentences = [sentence for sentence, _ in finished]
        self.vectors.feed(hidden_states, start, sentences, self.segmenter.begin)
        self._compare(seq_len=start + len(token_ids))
        self._penalty = self._penalties(hidden_states.device)
        self.num_non_execution += sum(
            self._is_non_execution(sentence, ids) for sentence, ids in finished
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

    def pack(self) -> dict[str, Any]:
        """What it has found out, as plain data and tensors."""
        own = {name: getattr(self, name) for name in _FOUND}
        return own | {"segmenter": self.segmenter.pack(), "vectors": self.vectors.pack()}

    def unpack(self, packed: dict[str, Any]) -> None:
        """Go on from what `pack` returned."""
        for name in _FOUND:
            setattr(self, name, packed[name])
        self.segmenter.unpack(packed["segmenter"])
        self.vectors.unpack(packed["vectors"])

    def _compare(self, seq_len: int) -> None:
        """Compare the new sentences with those before them."""
        num = len(self.segmenter.sentences)
        if self.late_similarities and num and self.segmenter.sentences[-1].end == seq_len:
            num -= 1
        if num > self._num_compared and self.vectors.vectors is not None:
            num_new = num - self._num_compared
            found = redundant(self.vectors.vectors[:num], num_new, self.tau, self.pair)
            self._add_similarities(found)
            self._num_compared = num

    def _is_non_execution(self, sentence: Sentence, token_ids: Sequence[int]) -> bool:
        num_of_prompt = max(self.prompt_len - sentence.begin, 0)
        if num_of_prompt and not self.count_prompt:
            return False
        if self._has_keyword(token_ids[num_of_prompt:]):
            return True
        # The code labels the first keyword that it meets in the prompt, and no other there.
        if self._prompt_is_labelled or not self._has_keyword(token_ids[:num_of_prompt]):
            return False
        self._prompt_is_labelled = True
        return True

    def _has_keyword(self, token_ids: Sequence[int]) -> bool:
        return is_non_execution(token_ids, self.tokenizer, self.keywords, self.keyword_match)

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
