"""``generate`` of transformers, as a contender."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvpolicy.compat import cache_argument
from kvpolicy.lab.bench.contenders.contender import GENERATE, Contender, Measurement
from kvpolicy.lab.bench.contenders.fill import filled_dynamic_cache
from kvpolicy.lab.bench.timing import durations, synchronized_time
from kvpolicy.lab.bench.workload import Decode, Prompts, Text

Context = Callable[[], AbstractContextManager[None]]


def generate(model: PreTrainedModel) -> Contender:
    """``generate`` with the full cache."""
    return generate_within(GENERATE, model, nullcontext)


def generate_within(
    name: str,
    model: PreTrainedModel,
    context: Context,
    *,
    budget: int | None = None,
    **fields: Any,
) -> Contender:
    """``generate``, greedy, within a context that may evict rows.

    Args:
        name: Name in tables.
        model: A model without an end-of-sequence token.
        context: Creates the context.
        budget: Rows that stay; ``None`` if nothing is evicted.
        fields: Further fields of the contender.
    """

    # All tensors are made in this mode: a compiled step would be compiled again for others.
    @torch.inference_mode()
    def decode(work: Decode) -> Measurement:
        rows = work.held if budget is None else min(work.held, budget)
        cache = filled_dynamic_cache(model, batch=work.batch, rows=rows, seed=work.seed)
        tokens = torch.tensor(work.prompts(model.config.vocab_size), device=model.device)
        # One token more than the cache has: the first that the model is given.
        given = torch.cat([tokens[:, :rows], tokens[:, :1]], dim=1)
        # The first step is that of the given token, which warms up the others.
        return _timed(model, context, given, torch.ones_like(given), cache, work.steps + 1)

    @torch.inference_mode()
    def text(work: Text) -> Measurement:
        prompts = work.prompts(model.config.vocab_size)
        cache = DynamicCache(config=model.config)
        token_ids, mask = left_pad(prompts, model.device)
        return _timed(model, context, token_ids, mask, cache, work.new_tokens, prefills=True)

    return Contender(name, decode, text, budget=budget, **fields)


def left_pad(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left: token ids and attention mask, ``[B, columns]`` each."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    token_ids, mask = (
        pad_sequence(part, batch_first=True, padding_side="left")
        for part in (rows, [torch.ones_like(row) for row in rows])
    )
    return token_ids, mask


def _timed(
    model: PreTrainedModel,
    context: Context,
    token_ids: Tensor,
    mask: Tensor,
    cache: DynamicCache,
    new_tokens: int,
    *,
    prefills: bool = False,
) -> Measurement:
    """Generate and time each token; after a prefill, the first decode step warms up the others."""
    timer = _TokenTimer(cache, len(token_ids), model.device)
    call: Any = model.generate
    with context():
        start = synchronized_time(model.device)
        call(
            token_ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([timer]),
            **cache_argument(cache),
        )
    skipped = int(prefills)
    # A step attends to the rows before it and to its own.
    attended = [held + timer.row_bytes for held in timer.held_bytes[:-1]]
    read = attended[skipped:]
    return Measurement(
        steps_s=durations(timer.times[skipped:]),
        kv_bytes=max(attended),
        read_bytes=sum(read) / len(read),
        prefill_s=timer.times[0] - start if prefills else None,
    )


class _TokenTimer(StoppingCriteria):
    """Records time and cache size at each token; never stops a sequence."""

    def __init__(self, cache: DynamicCache, batch: int, device: torch.device) -> None:
        self.times: list[float] = []
        self.held_bytes: list[int] = []
        self._cache = cache
        self._none_stopped = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(synchronized_time(self._none_stopped.device))
        self.held_bytes.append(sum(one.nbytes for one in self._tensors()))
        return self._none_stopped

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of every sequence."""
        return sum(one.nbytes // one.shape[2] for one in self._tensors())

    def _tensors(self) -> list[Any]:
        layers: list[Any] = list(self._cache.layers)
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]
