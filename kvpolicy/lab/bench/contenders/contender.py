"""A contender of a benchmark, and what is measured of it."""

from collections.abc import Callable, Mapping

import attrs

from kvpolicy.lab.bench.profile import StepProfile
from kvpolicy.lab.bench.roofline import Machine
from kvpolicy.lab.bench.workload import Decode, Prefill, Text, Workload

# Names of contenders.
LIMIT = "machine limit"
PRODUCTS_ALONE = "products alone"
MODEL_ALONE = "model alone"
GENERATE = "generate"
CONTINUOUS = "generate_batch"
VLLM, OPENVINO, LLAMA_CPP = "vLLM", "OpenVINO", "llama.cpp"
RIVALS = (VLLM, OPENVINO, LLAMA_CPP)  # other engines, in processes of their own
FORWARD = "transformers' forward"
# What else a contender is compared with, whatever its name is.
FULL, FIRST_PLAN, KVPRESS = "full cache", "first plan", "kvpress"


@attrs.frozen
class Measurement:
    """Times and memory of one contender at one work.

    Attributes:
        steps_s: Seconds of each measured decode step, or their mean as the only one, from
            contenders that tell no more; those of a prefill, as the only one.
        kv_bytes: Peak bytes of the cache.
        read_bytes: Bytes of keys and values that a step attends to, the mean over the steps.
        prefill_s: Seconds until the first token of every sequence; ``None`` without a prefill.
        policy_share: Share of the decode time spent on policies; ``None`` if not measured.
        compacted: Compactions of one sequence in one layer in each measured step; ``None`` for
            contenders that do not count them.
        path: How steps were run: ``"static"``, or ``"eager: REASON"``; empty if that is not known.
        machine: What the machine can do, of its limit only.
        device_bytes: Peak bytes allocated on a GPU, the model included; ``None`` without one.
        compile_s: Seconds in which torch compiled, before the steps.
        batch: Sequences that were decoded together; whoever runs contenders notes it.
        profile: What a device did in some further steps, if that was asked for.
        rows_mean: Rows that a sequence attends to, the mean over steps and layers; ``None``: as
            many as ``read_bytes`` are in the model's precision.
    """

    steps_s: tuple[float, ...]
    kv_bytes: int
    read_bytes: float
    prefill_s: float | None = None
    policy_share: float | None = None
    compacted: tuple[int, ...] | None = None
    path: str = ""
    machine: Machine | None = None
    device_bytes: int | None = None
    compile_s: float = 0.0
    batch: int = 0
    profile: StepProfile | None = None
    rows_mean: float | None = None

    @property
    def compactions(self) -> int | None:
        """Compactions in all measured steps; ``None`` if they were not counted."""
        return None if self.compacted is None else sum(self.compacted)

    @property
    def mean_step_s(self) -> float:
        """Mean seconds of a decode step."""
        return sum(self.steps_s) / len(self.steps_s)


@attrs.frozen
class Contender:
    """An implementation to measure.

    Attributes:
        name: Name in tables.
        decode: Builds, fills to as many tokens as are held, steps, and measures; ``None`` if it
            cannot.
        text: Generates whole texts; ``None`` if it cannot.
        prefill: Brings prompts in; ``None`` if it cannot.
        budget: Rows that stay; ``None`` if nothing is evicted.
        references: Names of the contenders with which its speed is compared, by what they are
            called in tables, such as `GENERATE` or `KVPRESS`.
        policy: Policy that gives it its colour in figures; empty for none.
        period: Steps after which its work repeats: those between two compactions of a sequence.
        most_held: The most tokens to which it can be filled in reasonable time.
        batch_within: Tells how many sequences of a work fit into so many bytes; ``None`` if it can
            not tell better than by their keys and values.
        has_cache: Whether its speed depends on a cache, and its batch on memory.
        is_outside: Whether it runs in another process, whose memory is not seen.
        has_limit: Whether it reads the weights that the limit of the machine is computed with, and
            not fewer bytes.
    """

    name: str
    decode: Callable[[Decode], Measurement] | None = None
    text: Callable[[Text], Measurement] | None = None
    prefill: Callable[[Prefill], Measurement] | None = None
    budget: float | None = None
    references: Mapping[str, str] = {GENERATE: GENERATE}
    policy: str = ""
    period: int = 1
    most_held: int | None = None
    batch_within: Callable[[Decode, float], int] | None = None
    has_cache: bool = True
    is_outside: bool = False
    has_limit: bool = True

    def supports(self, work: Workload) -> bool:
        """Whether it can do this work."""
        if isinstance(work, Text):
            return self.text is not None
        if isinstance(work, Prefill):
            return self.prefill is not None
        return self.decode is not None and (self.most_held is None or work.held <= self.most_held)

    def num_steps(self, work: Decode) -> int:
        """Steps that are measured: a multiple of those after which its work repeats.

        So compactions count as often as they happen. Sequences are compacted one by one, evenly.
        """
        period = self.period if work.compacts_all else -(-self.period // work.batch)
        return -(-work.steps // period) * period

    def run(self, work: Workload) -> Measurement:
        """Do one work that it supports."""
        if isinstance(work, Text):
            assert self.text is not None
            return self.text(work)
        if isinstance(work, Prefill):
            assert self.prefill is not None
            return self.prefill(work)
        assert self.decode is not None
        return self.decode(attrs.evolve(work, steps=self.num_steps(work)))
