"""The clock of policies: host time on a CPU, events on a GPU, which are read late."""

import attrs
import pytest
import torch

from kvpolicy.hooks import timing
from kvpolicy.hooks.timing import PolicyTimings

CUDA = torch.device("cuda", 0)


@attrs.define
class Gpu:
    """A stream whose clock advances by hand; notes waits."""

    now: float = 0.0  # milliseconds
    waits: int = 0

    def record_event(self, event: "Event") -> "Event":
        event.at = self.now
        return event


@attrs.define
class Event:
    gpu: Gpu
    at: float = -1.0

    def synchronize(self) -> None:
        self.gpu.waits += 1

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(gpu))
    return gpu


def spend(timings: PolicyTimings, gpu: Gpu, part: str, ms: float) -> None:
    with timings.time(part, CUDA):
        gpu.now += ms


def test_work_on_a_gpu_is_timed_without_a_wait_until_it_is_read(gpu: Gpu) -> None:
    timings = PolicyTimings()
    spend(timings, gpu, "score_s", 500)
    with timings.decoding():
        gpu.now += 1000  # the model
        spend(timings, gpu, "score_s", 250)
        spend(timings, gpu, "compaction_s", 125)
    assert gpu.waits == 0
    assert timings.read() == {
        "annotate_s": 0.0,
        "observe_s": 0.0,
        "lookahead_s": 0.0,
        "score_s": 0.75,
        "select_s": 0.0,
        "compaction_s": 0.125,
        "steer_s": 0.0,
        "decode_policy_s": 0.375,
    }
    assert timings.policy_s == 0.875
    assert timings.read()["score_s"] == 0.75  # not counted twice


def test_few_events_are_kept(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MOST_PENDING", 4)
    timings = PolicyTimings()
    for _ in range(20):
        spend(timings, gpu, "select_s", 1000)
        assert len(timings._pending) <= 4
    assert timings.read()["select_s"] == 20


def test_a_clock_continues_from_another(gpu: Gpu) -> None:
    first, second = PolicyTimings(), PolicyTimings(score_s=9.0)
    spend(first, gpu, "score_s", 1000)
    second.take(first)
    spend(second, gpu, "score_s", 1000)
    assert second.read()["score_s"] == 2
    assert first.read()["score_s"] == 1


def test_the_host_is_timed_on_a_cpu() -> None:
    timings = PolicyTimings()
    with timings.decoding(), timings.time("steer_s", torch.device("cpu")):
        pass
    assert timings.steer_s > 0
    assert timings.decode_policy_s == timings.policy_s == timings.steer_s
