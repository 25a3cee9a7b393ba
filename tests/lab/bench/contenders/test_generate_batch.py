"""Continuous batching of transformers is measured in steps of all sequences."""

import pytest
from bench_parts import ROW
from tiny import tiny_model

from kvpolicy.lab.bench.contenders.generate_batch import continuous_batching
from kvpolicy.lab.bench.workload import Decode, Text


@pytest.mark.filterwarnings("ignore")  # from transformers
def test_continuous_batching_decodes_all_sequences_together() -> None:
    model = tiny_model()
    contender, reason = continuous_batching(model)
    if contender is None:
        pytest.skip(str(reason))
    attention = model.config._attn_implementation
    done = contender.run(Decode(batch=9, held=70, steps=5))
    assert len(done.steps_s) == 5
    assert done.kv_bytes >= 9 * 75 * ROW
    assert model.config._attn_implementation == attention
    text = contender.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=12))
    assert 8 <= len(text.steps_s) <= 11
    assert not contender.supports(Decode(1, 4096, 1)), "its prompts are prefilled"
