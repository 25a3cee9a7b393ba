"""`generate` is measured over the full cache."""

import numpy as np
import torch
from bench_parts import ROW, cell
from tiny import greedy_tokens, tiny_model

from kvpolicy.engine.engine import Engine
from kvpolicy.lab.bench.contenders.generate import generate, left_pad
from kvpolicy.lab.bench.workload import Decode, Text


def test_generate_measures_the_full_cache() -> None:
    """Left-padded generate gives the tokens of the engine, and the bytes of a full cache."""
    model = tiny_model("qwen2", seed=3)
    work = Text(batch=2, prompt_min=2, prompt_max=4, new_tokens=6)
    contender = generate(model)
    assert contender.text is not None
    done = contender.text(work)
    # The last token is never fed back, so that its row is missing.
    assert done.kv_bytes == 2 * ROW * (4 + 6 - 1)
    # Five decode steps; the first does not count, and the second sees two rows after the prompt.
    assert len(done.steps_s) == 4
    assert done.read_bytes == 2 * ROW * (4 + np.mean([2, 3, 4, 5]))
    assert done.prefill_s is not None
    assert done.prefill_s > 0
    prompts = work.prompts(61)
    run = Engine(model, None, cell("full").resolved, slots=2).generate(
        prompts, max_new_tokens=6, stop_ids=()
    )
    for result, prompt in zip(run.results(), prompts, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 6)


def test_generate_decodes_over_a_filled_cache() -> None:
    """One token is given to a forward at a time, and each attends to all rows before it."""
    model = tiny_model()
    seen: list[tuple[int, ...]] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    done = generate(model).decode(Decode(batch=3, held=50, steps=4))
    handle.remove()
    assert seen == [(3, 1)] * 5, "the first warms up the others"
    assert len(done.steps_s) == 4
    assert done.kv_bytes == 3 * ROW * 55
    assert done.read_bytes == 3 * ROW * (51 + 2.5)
    assert done.prefill_s is None


def test_prompts_are_padded_on_the_left() -> None:
    token_ids, mask = left_pad([[1, 2, 3], [4]], torch.device("cpu"))
    assert token_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
