"""Continuous batching of transformers (``generate_batch``), as a contender.

It prefills its prompts, since its pages cannot be filled from outside, and computes attention of
all sequences over the pages of all of them. Times are those between the forwards of the model in
which every sequence has one token.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import CONTINUOUS, Contender, Measurement
from kvpolicy.lab.bench.models import kv_row_bytes
from kvpolicy.lab.bench.timing import durations
from kvpolicy.lab.bench.workload import Decode, Prompts, Text

# Without bounds of its own it allocates for the whole memory, and every step reads that.
_PAGE = 256  # tokens
_MAX_BATCH_TOKENS = 512
_MOST_HELD = 2048  # on CPUs; a prefill of more takes minutes in every round


def continuous_batching(
    model: PreTrainedModel,
) -> tuple[Contender | None, str | None]:
    """The contender, or the reason why there is none."""
    try:
        from transformers import ContinuousBatchingConfig

        # Without a margin: all sequences are admitted, and no page is allocated in vain.
        bounded = partial(ContinuousBatchingConfig, page_size=_PAGE, safety_margin=0.0)
        bounded(num_blocks=1, max_batch_tokens=1)
    except (ImportError, TypeError):
        return None, f"{CONTINUOUS} with bounds needs transformers 5.17 or newer"

    def measure(prompts: Prompts, new_tokens: int, most_steps: int | None) -> Measurement:
        longest = max(map(len, prompts))
        pages = len(prompts) * -(-(longest + new_tokens + 1) // _PAGE) + 1
        bounds = bounded(num_blocks=pages, max_batch_tokens=max(_MAX_BATCH_TOKENS, len(prompts)))
        generation = copy.deepcopy(model.generation_config)
        assert generation is not None
        generation.update(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        with _forwards(model) as forwards:
            call: Any = model.generate_batch
            found = call(
                [list(prompt) for prompt in prompts],
                generation_config=generation,
                continuous_batching_config=bounds,
            )
        _check(found, len(prompts), new_tokens)
        steps = _decode_steps(forwards, len(prompts))[1:][:most_steps]
        if not steps:
            msg = (
                f"{CONTINUOUS} of transformers had no two steps with {len(prompts)} sequences; "
                f"leave it out: --without {CONTINUOUS}"
            )
            raise KVPolicyError(msg)
        row_bytes = kv_row_bytes(model)
        held = sum(len(prompt) + new_tokens / 2 for prompt in prompts)
        return Measurement(steps, kv_bytes=pages * _PAGE * row_bytes, read_bytes=held * row_bytes)

    def decode(work: Decode) -> Measurement:
        # The first prompts that are in are decoded while the others are prefilled.
        chunks = -(-work.batch * work.held // _MAX_BATCH_TOKENS)
        new_tokens = work.steps + chunks + 4
        return measure(work.prompts(model.config.vocab_size), new_tokens, work.steps)

    def text(work: Text) -> Measurement:
        return measure(work.prompts(model.config.vocab_size), work.new_tokens, None)

    most_held = _MOST_HELD if model.device.type == "cpu" else None
    return Contender(CONTINUOUS, decode, text, most_held=most_held), None


@contextmanager
def _forwards(model: PreTrainedModel) -> Iterator[list[tuple[float, int]]]:
    """Collects the time and the number of tokens of every forward, and keeps the attention."""
    found: list[tuple[float, int]] = []
    attention = model.config._attn_implementation

    def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        found.append((time.perf_counter(), token_ids.numel()))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
        model.set_attn_implementation(attention)


def _decode_steps(forwards: Sequence[tuple[float, int]], batch: int) -> tuple[float, ...]:
    """Seconds between forwards with one token of every sequence, the longest run of them."""
    runs = [
        list(run) for one_each, run in groupby(forwards, lambda one: one[1] == batch) if one_each
    ]
    longest = max(runs, key=len, default=[])
    return durations([when for when, _ in longest])


def _check(found: Any, batch: int, new_tokens: int) -> None:
    lengths = [len(one.generated_tokens) for one in found.values()]
    if lengths != [new_tokens] * batch:
        msg = (
            f"{CONTINUOUS} of transformers generated {lengths} tokens where {batch} times "
            f"{new_tokens} were wanted; leave it out: --without {CONTINUOUS}"
        )
        raise KVPolicyError(msg)
