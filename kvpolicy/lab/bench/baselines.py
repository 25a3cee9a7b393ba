"""Who the engine is measured against in the same process: ``generate``, and the model alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvpolicy.lab.bench.contender import Contender, Effort, Prompts, now, pad

GENERATE = "generate"
SINGLE = "model alone"

_ALONE_STEPS = 64  # all alike; more would only take time


def generate(model: PreTrainedModel) -> Contender:
    """Transformers' own ``generate`` with the full cache."""
    return Contender(GENERATE, timed_generate(model, nullcontext))


def model_alone(model: PreTrainedModel) -> Contender:
    """The model on one token of each sequence, without a cache: faster than this nobody can be.

    It attends from each token to itself, so that the work of all other parts is left.
    """

    @torch.inference_mode()
    def run(prompts: Prompts, new_tokens: int) -> Effort:
        token_ids = pad([prompt[:1] for prompt in prompts], model.device)[0]
        times = []
        for _ in range(min(new_tokens, _ALONE_STEPS)):
            logits = model(input_ids=token_ids, use_cache=False).logits
            token_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            times.append(now(model.device))
        return Effort(None, _steps(times), kv_bytes=0, read_bytes=0)

    return Contender(SINGLE, run)


def timed_generate(
    model: PreTrainedModel, around: Callable[[], AbstractContextManager[None]]
) -> Callable[[Prompts, int], Effort]:
    """What runs ``generate`` greedily and notes when each token is out.

    Args:
        model: A model without an end-of-sequence token.
        around: Makes a block in which ``generate`` is called.

    Returns:
        Continues prompts, padded on the left to the longest, by so many tokens.
    """

    def run(prompts: Prompts, new_tokens: int) -> Effort:
        token_ids, mask = pad(prompts, model.device)
        cache = DynamicCache(config=model.config)
        ticks = _Ticks(cache, len(prompts), model.device)
        call: Any = model.generate
        with torch.inference_mode(), around():
            begun = now(model.device)
            call(
                token_ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([ticks]),
            )
        # A step attends to what was held before it and to its own row.
        attended = [held + ticks.row_bytes for held in ticks.held_bytes[:-1]]
        return Effort(
            prefill_s=ticks.times[0] - begun,
            steps_s=_steps(ticks.times),
            kv_bytes=max(attended),
            read_bytes=sum(attended[1:]),
        )

    return run


class _Ticks(StoppingCriteria):
    """Notes when each token is out, and what the cache holds then; never stops anything."""

    def __init__(self, cache: DynamicCache, batch: int, device: torch.device) -> None:
        self.times: list[float] = []
        self.held_bytes: list[int] = []
        self._cache = cache
        self._go_on = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(now(self._go_on.device))
        self.held_bytes.append(sum(one.nbytes for one in self._tensors()))
        return self._go_on

    @property
    def row_bytes(self) -> int:
        """Bytes that one token of every sequence takes."""
        return sum(one.nbytes // one.shape[2] for one in self._tensors())

    def _tensors(self) -> list[Any]:
        layers: list[Any] = list(self._cache.layers)
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _steps(times: list[float]) -> tuple[float, ...]:
    """Seconds of each step but the first, from when each token was out."""
    return tuple(after - before for before, after in pairwise(times[1:]))
