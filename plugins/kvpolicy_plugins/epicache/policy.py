"""EpiCache's eviction: rows stay that a patched prompt attends to."""

from typing import Any, ClassVar

import attrs
import torch
from attrs.validators import ge, instance_of
from torch import Tensor

from kvpolicy import KVPolicyError, Lookahead, Memory, hookimpl, observed_weights, top_rows

# Attention weights that are computed together: bounds the memory of long patched prompts.
_WEIGHTS_AT_ONCE = 1 << 24


def _text_or_ids(value: Any) -> Any:
    """Token ids as a tuple; what is wrong is left to the validator."""
    return tuple(value) if isinstance(value, list) else value


def _is_prompt(instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
    is_ids = isinstance(value, tuple) and all(type(token) is int and token >= 0 for token in value)
    if not isinstance(value, str) and not is_ids:
        msg = f"'{attribute.name}' must be a text or a list of token ids: {value!r:.60}"
        raise TypeError(msg)


@attrs.define(eq=False, kw_only=True)
class EpiCache:
    """EpiCache: keep the rows that a patched prompt attends to most, block by block.

    Kim et al., "EpiCache: Episodic KV Cache Management for Long Conversational Question
    Answering", ICML 2026 (arXiv 2509.17396), sections 3.1 to 3.3; code at apple/ml-epicache
    b742661, ``KVScore._get_score_flatten`` and ``EvictCache``.

    A prompt is prefilled in blocks of the plan's ``buffer`` (M_block) into a slab of
    ``budget + buffer`` rows (M + M_block). After each block the *patched prompt* P is run over the
    rows and forgotten (`lookahead`); a row's score is the largest attention weight that any of its
    tokens gives it:

        s_i = max_{t in P, g in group} softmax_i(q_{t,g} · k_i / sqrt(d)),  i over the rows held

    Keys of the patched prompt are not in the softmax, and there is no mask: its tokens come after
    all rows. Scores are computed anew for all rows at each compaction. In a plan with
    ``heads = "shared"`` the best rows of all heads of a layer stay together (the authors' level
    ``pair``), else ``budget`` of each (``pair-uniform``).

    The last block is compacted when the prompt is in, however short it is. Those of later turns of
    a resumed sequence are not: a question and its answer stay beside the ``budget`` rows until the
    buffer is full. This is the method for one episode; `kvpolicy_plugins.epicache.store` groups a
    conversation into several, and keeps a cache for each.

    Deviations: a block ends when a layer's slab is full, not at multiples of M_block, so that the
    first compaction sees ``budget + buffer`` rows. With heads that share rows, one row of each
    stays at least, since a head without rows cannot attend. The patched prompt begins at the
    position after the last token, not at that of the last token. Answers are bounded, too: a full
    buffer is compacted in decode as in prefill. Scores are in fp32; of equal ones, the newer row
    stays.

    Attributes:
        prompt: The patched prompt: a text, or token ids where the engine has no tokenizer.
        n_last: Newest tokens of the sequence that follow it in the patched prompt.
        lookahead_size: The most tokens of the patched prompt; the end of a longer ``prompt`` is
            left out.
        n_sink: First tokens of the sequence that always stay; the authors have none.
        n_recent: Newest rows that always stay; the authors have none.
    """

    ragged: ClassVar[bool] = True
    stages_prompts: ClassVar[bool] = False  # the buffer is the block of a prompt, too

    prompt: str | tuple[int, ...] = attrs.field(
        default=(
            "\n\nExtract the essential information of this conversation: who said what, names, "
            "numbers, dates, places, plans and decisions.\n\n"
        ),
        converter=_text_or_ids,
        validator=_is_prompt,
    )
    n_last: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    lookahead_size: int = attrs.field(default=512, validator=[instance_of(int), ge(1)])
    n_sink: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    n_recent: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])

    def __attrs_post_init__(self) -> None:
        if not self.prompt and not self.n_last:
            msg = "'prompt' is empty and 'n_last' is 0: the patched prompt needs a token"
            raise ValueError(msg)
        if self.n_last > self.lookahead_size:
            msg = (
                f"'n_last' must not exceed 'lookahead_size': {self.n_last} > {self.lookahead_size}"
            )
            raise ValueError(msg)

    @property
    def protects(self) -> tuple[int, int]:
        """First tokens and newest rows that stay."""
        return self.n_sink, self.n_recent

    @hookimpl
    def due(self, seq_len: Tensor, prompt_len: Tensor, memory: Memory) -> Tensor:
        """Compact the last block of the first prompt, and none of those of later turns."""
        is_end = seq_len == prompt_len
        first = [
            notes.setdefault("prompt_len", length) if ends else length
            for notes, length, ends in zip(
                memory.of(self), prompt_len.tolist(), is_end.tolist(), strict=True
            )
        ]
        return is_end & (prompt_len == torch.tensor(first))

    @hookimpl
    def lookahead(self, token_ids: Tensor, tokenizer: Any) -> Lookahead:
        """Ask for the queries of the patched prompt."""
        newest = token_ids[-self.n_last :].tolist() if self.n_last else []
        text = self._prompt_ids(tokenizer)[: self.lookahead_size - len(newest)]
        if not text and not newest:
            msg = (
                f"the tokenizer has no token for the text {self.prompt!r:.60}; give another prompt"
            )
            raise KVPolicyError(msg)
        return Lookahead(token_ids=(*text, *newest))

    @hookimpl
    def score(
        self, keys: Tensor, positions: Tensor, lookahead_queries: Tensor | None, seq_len: Tensor
    ) -> Tensor | None:
        """Score rows by the largest weight that a token of the patched prompt gives them.

        Without queries of a lookahead, because the model has no positions left for one, there is no
        opinion: the newest rows stay.
        """
        if lookahead_queries is None:
            return None
        num_heads, num_rows = keys.shape[1:3]
        width = max(_WEIGHTS_AT_ONCE // (num_rows * lookahead_queries[:, :, 0, 0].numel()), 1)
        scores = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
        for queries in lookahead_queries.split(width, dim=2):
            after = seq_len + queries.shape[2]  # all rows are before them
            weights = observed_weights(queries, keys, positions, after, present=positions >= 0)
            of_heads = weights.unflatten(1, (num_heads, -1)).amax(dim=(2, 3))  # [B, H_kv, T]
            scores = torch.maximum(scores, of_heads)
        return scores

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        """Choose among the rows of all heads together where they share a budget."""
        if heads == "own":
            return None
        best = scores.argmax(dim=2, keepdim=True)  # a head without rows could not attend
        together = scores.scatter(2, best, torch.inf).flatten(1)[:, None]  # [B, 1, H_kv * T]
        kept = top_rows(together, budget * scores.shape[1])
        mask = torch.zeros_like(together, dtype=torch.bool).scatter(2, kept, True)
        return mask.reshape(scores.shape) & (positions >= 0)

    def _prompt_ids(self, tokenizer: Any) -> tuple[int, ...]:
        if isinstance(self.prompt, tuple) or not self.prompt:
            return tuple(self.prompt)  # type: ignore[arg-type]
        if tokenizer is None:
            msg = (
                "policy 'epicache' has a patched prompt that is text, and the engine has no "
                "tokenizer; give token ids"
            )
            raise KVPolicyError(msg)
        return tuple(tokenizer(self.prompt, add_special_tokens=False)["input_ids"])
