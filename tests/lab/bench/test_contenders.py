"""Contenders of the benchmark do the work that they say: tokens held, rows read, compactions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import greedy_tokens, shared_model, tiny_model
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench import check, launches, limit
from kvpolicy.lab.bench.check import check_compactions, check_tokens
from kvpolicy.lab.bench.contender import Contender, Decode, Text
from kvpolicy.lab.bench.continuous import continuous_batching
from kvpolicy.lab.bench.engine import engine_under
from kvpolicy.lab.bench.fill import fill_run, filled_dynamic_cache
from kvpolicy.lab.bench.generate import generate, left_pad, model_alone
from kvpolicy.lab.bench.limit import machine_limit, memory_bandwidth, product_speed
from kvpolicy.lab.bench.models import kv_row_bytes, weight_bytes
from kvpolicy.lab.bench.vllm import vllm_contender
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

LAYERS, HEADS, HEAD_DIM, IN_FP32 = 2, 2, 8, 4  # of the tiny model
ROW = 2 * LAYERS * HEADS * HEAD_DIM * IN_FP32


def cell(stack: str, budget: int = 8, buffer: int = 4) -> Cell:
    knobs = {"delimiters": [1, 2]} if stack == "skipkv" else {}  # there is no tokenizer
    series = [Series(stack, {"stack": [{"policy": stack, **knobs}]})]
    return build_cells(series, num_layers=LAYERS, budgets=[budget], buffer=buffer)[0]


def lengths_of(work: Text) -> list[int]:
    return [len(prompt) for prompt in work.prompts(61)]


# Filled caches


@given(st.integers(5, 90), st.integers(1, 4), st.sampled_from(["full", "h2o", "snapkv", "knorm"]))
def test_a_filled_run_holds_what_it_would_in_a_steady_state(
    held: int, slots: int, stack: str
) -> None:
    budget, buffer = 16, 8
    engine = Engine(shared_model(), None, cell(stack, budget, buffer).resolved, slots=slots)
    run = engine.generate([[1, 2, 3]] * slots, max_new_tokens=held + 40, stop_ids=())
    run.step()
    fill_run(run, held)
    cache = run.cache
    assert cache.seq_len.tolist() == [held] * slots
    for layer_idx, layer in enumerate(cache.layers):
        for slot in range(slots):
            num = int(cache.rows[layer_idx, slot])
            most = budget + slot * buffer // slots
            assert num == (held if stack == "full" else min(held, most))
            positions = layer.positions[slot]
            assert (positions[:, :num].diff(dim=-1) > 0).all(), "rising"
            assert 0 <= positions[:, 0].min() <= positions[:, num - 1].max() < held
            assert (positions[:, num:] == -1).all()
            assert layer.keys[slot, :, :num].std() > 0.5
            is_compacted = bool(cache.compacted_at[layer_idx, slot])
            assert is_compacted == (num < held), "a row further is a position further, or not"
    seen = [len(seq.prompt) + len(seq.tokens) - 1 for seq in run.batch.active]
    assert seen == [held] * slots
    for _ in range(2 * buffer):
        run.step()
    assert cache.seq_len.tolist() == [held + 2 * buffer] * slots
    if stack != "full" and held >= budget + buffer:
        # Once in a buffer for every sequence and layer, spread over the steps.
        assert run.report.compactions == 2 * slots * LAYERS


def test_a_filled_cache_has_rows_in_all_layers() -> None:
    cache = filled_dynamic_cache(tiny_model(), batch=3, rows=5000)
    assert cache.get_seq_length() == 5000
    assert len(cache.layers) == LAYERS
    for layer in cache.layers:
        assert layer.keys is not None
        assert layer.keys.shape == (3, HEADS, 5000, HEAD_DIM)
        assert not torch.equal(layer.keys, layer.values)


# In this process


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


@pytest.mark.parametrize(("stack", "new_tokens"), [("full", 6), ("knorm", 19)])
def test_the_engine_attends_to_as_many_rows_as_a_plain_count(stack: str, new_tokens: int) -> None:
    budget, buffer = 8, 4
    contender = engine_under(tiny_model(), cell(stack, budget, buffer))
    work = Text(batch=2, prompt_min=2, prompt_max=4, new_tokens=new_tokens)
    assert contender.text is not None
    done = contender.text(work)
    rows_read, compactions = 0, 0
    for rows in lengths_of(work):
        for step in range(1, new_tokens):
            rows += 1
            if step > 1:
                rows_read += rows
            if stack != "full" and rows == budget + buffer:
                rows = budget
                compactions += 0 if step == new_tokens - 1 else LAYERS  # its text has ended
    assert done.read_bytes == pytest.approx(rows_read * ROW / (new_tokens - 2))
    assert done.compactions == compactions
    assert len(done.steps_s) == new_tokens - 2
    # Keys, values, and positions of 8 bytes; a full cache is allocated for the longest sequence.
    slab = 4 + 6 if stack == "full" else budget + buffer
    allocated = LAYERS * 2 * HEADS * slab * (2 * HEAD_DIM * IN_FP32 + 8)
    moved = 0 if stack == "full" else HEADS * budget * HEAD_DIM * IN_FP32
    assert allocated + moved <= done.kv_bytes <= allocated + 4 * moved
    assert done.policy_share is not None
    assert 0 <= done.policy_share < 1
    assert (done.policy_share > 0) == (stack != "full")


@pytest.mark.parametrize("stack", ["full", "knorm", "h2o", "skipkv"])
def test_the_engine_decodes_over_a_filled_cache(stack: str) -> None:
    """A buffer of steps compacts every sequence once in every layer."""
    budget, buffer, batch, held = 16, 6, 3, 100
    contender = engine_under(tiny_model(), cell(stack, budget, buffer))
    done = contender.run(Decode(batch, held, steps=1))
    if stack == "full":
        assert (done.compactions, len(done.steps_s)) == (0, 1)
        assert done.read_bytes == batch * ROW * (held + 2), "the warm-up's row and its own"
        return
    assert len(done.steps_s) == contender.period == buffer
    assert done.compactions == batch * LAYERS
    assert done.policy_share is not None
    assert 0 < done.policy_share < 1
    # Every sequence passes through all numbers of rows, whatever it began with.
    assert done.read_bytes == batch * ROW * np.mean(np.arange(budget + 1, budget + buffer + 1))


def test_policies_take_no_more_than_all_of_the_decode_time() -> None:
    """Long prompts and few tokens: nearly all compactions are before the first decode step."""
    contender = engine_under(tiny_model(), cell("knorm"))
    assert contender.text is not None
    done = contender.text(Text(2, 120, 120, 3))
    assert done.policy_share is not None
    assert 0 <= done.policy_share <= 1


def test_the_model_alone_has_no_cache() -> None:
    contender = model_alone(tiny_model())
    for work in (Decode(2, 9, 7), Text(2, 2, 4, 7)):
        done = contender.run(work)
        assert (done.kv_bytes, done.read_bytes, done.prefill_s) == (0, 0, None)
        assert len(done.steps_s) == 7


def test_the_limit_reads_or_multiplies_the_weights_and_reads_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    weights = weight_bytes(model)
    monkeypatch.setattr(limit, "memory_bandwidth", lambda _: 1000.0)
    monkeypatch.setattr(limit, "product_speed", lambda *_: 1e9)
    held = machine_limit(model).run(Decode(batch=3, held=50, steps=4))
    assert held.read_bytes == 3 * ROW * 52.5
    assert held.steps_s == pytest.approx(((weights + held.read_bytes) / 1000,))
    monkeypatch.setattr(limit, "product_speed", lambda *_: 10.0)
    text = machine_limit(model).run(Text(2, prompt_min=3, prompt_max=5, new_tokens=10))
    assert text.read_bytes == 2 * ROW * (4 + 5)
    products = 2 * 2 * weights / IN_FP32
    assert text.steps_s == pytest.approx((products / 10 + text.read_bytes / 1000,))


def test_what_a_machine_does_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < memory_bandwidth(cpu, 2**22) < 1e13
    for dtype in (torch.float32, torch.float64):
        assert 1e7 < product_speed(cpu, dtype, 64) < 1e14


def test_prompts_are_padded_on_the_left() -> None:
    token_ids, mask = left_pad([[1, 2, 3], [4]], torch.device("cpu"))
    assert token_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


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
    assert not contender.does(Decode(1, 4096, 1)), "its prompts are prefilled"


# vLLM

FAKE_VLLM = """
import json, pathlib, time
from types import SimpleNamespace

__version__ = "0"
print("a library that prints to the standard output")
STEP_S, clock = 0.002, [0.0]
time.perf_counter = lambda: clock[0]

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, model, **options):
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        assert (pathlib.Path(model) / "model.safetensors").exists()
        assert options["skip_tokenizer_init"] and not options["enable_prefix_caching"]
        assert options["kv_transfer_config"]["kv_connector"] == "DecodeBenchConnector"
        assert options["dtype"] == "float32" and options["max_model_len"] == 64

    def generate(self, prompts, wanted, use_tqdm):
        print("generating")
        assert wanted.ignore_eos and wanted.temperature == 0
        clock[0] += 0.2  # whatever precedes the first token
        clock[0] += STEP_S * wanted.max_tokens
        if wanted.max_tokens == 60:
            raise ValueError("too many\\ntokens")
        output = SimpleNamespace(token_ids=[0] * wanted.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]
"""


@contextmanager
def fake_vllm(folder: Path, model: PreTrainedModel, source: str) -> Iterator[Contender]:
    """vLLM of an interpreter that imports another module of that name."""
    (folder / "vllm.py").write_text(source)
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, {str(folder)!r})\n"
        "assert sys.argv[1] == '-I'\nrunpy.run_path(sys.argv[2], run_name='__main__')\n"
    )
    python.chmod(0o755)
    with vllm_contender(model, python, kv_bytes=2**20, most_tokens=64) as contender:
        yield contender


def test_vllm_is_measured_by_the_difference_of_two_lengths(tmp_path: Path) -> None:
    """The 0.2 s before the first token do not count."""
    model = tiny_model()
    with fake_vllm(tmp_path, model, FAKE_VLLM) as contender:
        done = contender.run(Decode(batch=2, held=10, steps=1))
        text = contender.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=9))
        with pytest.raises(KVPolicyError, match=r"ValueError: too many; .*--vllm-python"):
            contender.run(Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=60))
    for measured in (done, text):
        (step_s,) = measured.steps_s
        assert step_s == pytest.approx(0.002)
    assert done.kv_bytes == 2 * ROW * (10 + 32), "at least 32 steps"
    assert done.read_bytes == 2 * ROW * (10 + 16.5)
    assert contender.does(Decode(1, 16_384, 1)), "nothing is prefilled"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('no such engine')", "ImportError: no such engine"),
        ("import os, sys; print('gone', file=sys.stderr, flush=True); os._exit(3)", "gone"),
        ("import os; os._exit(3)", "it ended without a word"),
    ],
)
def test_a_vllm_that_does_not_start_is_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message), fake_vllm(tmp_path, tiny_model(), source):
        pass


# Counts in place of times


def test_operations_and_values_read_are_counted() -> None:
    with launches._counting() as counted:
        numbers = torch.empty(4).fill_(1.0).view(2, 2).t()  # one: views and allocations are none
        found = bool((numbers + 1).sum() > 0)  # three, and a value
        numbers[0].tolist()
    assert found
    assert counted.operations == 1 + 3
    assert counted.reads == {"the model": 2}


@pytest.mark.parametrize("stack", ["full", "h2o"])
def test_steps_are_counted_by_kind(stack: str) -> None:
    work = Decode(batch=2, held=40, steps=1)
    found = launches.launches_under(tiny_model(), cell(stack), work)
    assert found.operations > launches.launches_alone(tiny_model(), work).operations
    assert found.path == "static"
    assert found.reads.pop("static_step.py:read") == 1, "the tokens"
    assert set(found.reads) <= {"late_checks.py:_read"}, "of the compactions before"
    assert sum(found.compacting_reads.values()) == 0
    assert (found.graphs, found.breaks) == (1, 0)
    if stack == "full":
        assert found.read_bytes == 2 * ROW * (40 + 2)
        assert (found.compacting, found.compacting_reads) == (None, {})
    else:
        assert found.compacting is not None
        assert found.compacting > 0


# Before a GPU's speed counts


def test_lost_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    check_compactions(device, repeats=4)
    keep = check.LayerRows.keep

    def racing(self: Any, kept: torch.Tensor, **options: Any) -> None:
        keep(self, kept, **options)
        self.keys[3, 1, 7] = self.keys[3, 1, 8]

    monkeypatch.setattr(check.LayerRows, "keep", racing)
    with pytest.raises(KVPolicyError, match="compaction 0 on cpu lost rows"):
        check_compactions(device, repeats=1)


def test_a_device_must_have_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, plans = torch.device("cpu"), [cell("full"), cell("h2o", budget=4000)]
    check_tokens(device, plans)
    tokens, calls = check._tokens, []

    def broken(model: PreTrainedModel, plan: Cell) -> list[tuple[int, ...]]:
        calls.append(plan.series)
        found = tokens(model, plan)
        return found if len(calls) < 4 else found[::-1]

    monkeypatch.setattr(check, "_tokens", broken)
    with pytest.raises(KVPolicyError, match="under h2o the tokens on cpu are not those"):
        check_tokens(device, plans)


def test_a_row_has_keys_and_values_of_all_layers() -> None:
    assert kv_row_bytes(tiny_model()) == ROW
