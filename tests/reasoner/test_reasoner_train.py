"""Training the reasoner: bit-exact resuming, learning rate, data, loss weights, attention."""

import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from functools import partial

import pytest
import torch
from kvpolicy_reasoner.task import make_problems, split_of
from kvpolicy_reasoner.tokenizer import build_tokenizer
from kvpolicy_reasoner.train.data import DataPlan, collate, examples_of_step
from kvpolicy_reasoner.train.learner import chunked_causal_attention, run_distributed
from kvpolicy_reasoner.train.loss_weights import AFTER_NEWLINES_WEIGHT
from kvpolicy_reasoner.train.optimizer import PEAK_LR, learning_rate
from kvpolicy_reasoner.train.train import CHECKPOINT, LOG, train
from safetensors.torch import load_file
from torch.nn import functional as F

from kvpolicy.errors import KVPolicyError

TOY = {"tokens": 6 * 1024, "tokens_per_step": 1024, "workers": 1}


@pytest.fixture(autouse=True)
def skip_tune_evaluation(monkeypatch):
    monkeypatch.setattr("kvpolicy_reasoner.train.train.tune_accuracy", lambda learner, team: 0.0)


@pytest.mark.nightly
def test_resumed_training_equals_uninterrupted_training(tmp_path):
    train(tmp_path / "whole", **TOY)
    train(tmp_path / "parts", **TOY, stop_after=3)
    train(tmp_path / "parts", **TOY)
    whole, parts = (load_file(tmp_path / run / CHECKPOINT) for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    log = [json.loads(line) for line in (tmp_path / "parts" / LOG).read_text().splitlines()]
    assert [record["step"] for record in log] == sorted({record["step"] for record in log})


@pytest.mark.nightly
def test_folder_of_another_run_raises_and_is_unchanged(tmp_path):
    train(tmp_path / "run", **TOY, stop_after=1)
    before = (tmp_path / "run" / CHECKPOINT).read_bytes()
    with pytest.raises(KVPolicyError):
        train(tmp_path / "run", **TOY, seed=1)
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": 10},
        {"workers": 0},
        {"tokens_per_step": 8},
        {"tokens": -1},
        {"device": "nowhere"},
        {"device": "meta", "workers": 2},
    ],
)
def test_invalid_options_raise(tmp_path, bad):
    with pytest.raises(KVPolicyError):
        train(tmp_path / "run", **(TOY | bad))
    assert not (tmp_path / "run").exists()


def test_learning_rate_warms_up_stays_and_decays_to_zero():
    rates = [learning_rate(step, 1000) for step in range(1001)]
    assert rates[0] < rates[10] < rates[20] == PEAK_LR
    assert set(rates[20:450]) == {PEAK_LR}
    assert all(a > b for a, b in itertools.pairwise(rates[451:]))
    assert rates[1000] == 0


def test_training_data_is_deterministic_and_from_the_train_split():
    plan = DataPlan(seed=0, num_steps=40, tokens_per_step=2048)
    tokenizer = build_tokenizer()
    for example in examples_of_step(plan, 21):
        assert split_of(tokenizer.decode(example.tokens[: example.prompt_len])) == "train"
    assert examples_of_step(plan, 21) == examples_of_step(DataPlan(0, 40, 2048), 21)
    assert examples_of_step(plan, 21) != examples_of_step(plan, 22)


def test_loss_weights_cover_the_trace_and_are_low_after_newlines():
    plan = DataPlan(seed=0, num_steps=40, tokens_per_step=1024)
    examples = examples_of_step(plan, 0)
    batch = collate(examples)
    newlines = build_tokenizer().convert_tokens_to_ids("\n\n")
    for row, example in enumerate(examples):
        for position, target in enumerate(example.tokens[1:]):
            weight = batch.weights[row, position].item()
            after_newlines = example.tokens[position] == newlines
            in_trace = position + 1 >= example.prompt_len
            assert weight == (in_trace * (AFTER_NEWLINES_WEIGHT if after_newlines else 1.0)), target
        assert (batch.weights[row, len(example.tokens) - 1 :] == 0).all()


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_chunked_attention_equals_causal_attention(length):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, 4, length, 8, generator=generator)
    key, value = (torch.randn(2, 2, length, 8, generator=generator) for _ in range(2))
    got, _ = chunked_causal_attention(torch.nn.Module(), query, key, value, None, 0.3)
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def test_held_out_problems_differ_between_seeds():
    prompts = [{p.prompt for p in make_problems(50, seed=seed)} for seed in (0, 1)]
    assert not prompts[0] & prompts[1]


def hold(fifo, processes):
    """Hold the end to write of a pipe for longer than the test waits."""
    with fifo.open("wb", buffering=0) as held:
        held.write(b"1")
        time.sleep(90)


def work_for_long(processes):
    time.sleep(90)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks the process that is killed")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_processes_of_a_training_end_with_the_one_that_began_them(tmp_path, number):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    train_together = partial(run_distributed, 2, partial(hold, fifo), lead=work_for_long)
    process = multiprocessing.get_context("fork").Process(target=train_together)
    process.start()
    select.select([alive], [], [], 60)
    assert os.read(alive, 1) == b"1"
    os.kill(process.pid, number)
    process.join()
    select.select([alive], [], [], 60)
    assert os.read(alive, 1) == b""
    os.close(alive)
