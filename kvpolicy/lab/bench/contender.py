"""Contenders of a benchmark, the work that each of them does, and their measurements."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import attrs
import torch

# Names of contenders with which others are compared.
GENERATE = "generate"
MODEL_ALONE = "model alone"
VLLM = "vLLM"
# What else a contender is compared with, whatever its name is.
FULL, FIRST_PLAN, KVPRESS = "full cache", "first plan", "kvpress"

Prompts = Sequence[Sequence[int]]


@attrs.frozen
class Decode:
    """Decode steps of texts that already have a number of tokens.

    Attributes:
        batch: Sequences decoded together.
        held: Tokens that each sequence has; a contender with a budget holds fewer rows.
        steps: Steps to measure, at least 1. One more before them warms up.
        seed: Random seed for tokens and rows.
        label: Name in tables, where the number of tokens does not tell works apart.
    """

    batch: int
    held: int
    steps: int
    seed: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.label or f"{self.held:,} held"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts of as many tokens; shorter ones are beginnings of longer ones."""
        return [
            torch.randint(
                vocab_size,
                (self.held,),
                generator=torch.Generator().manual_seed(self.seed + number),
            ).tolist()
            for number in range(self.batch)
        ]


@attrs.frozen
class Text:
    """Whole texts: prompts, each continued by a number of tokens.

    Attributes:
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each sequence, at least 3.
        seed: Random seed for prompts.
    """

    batch: int
    prompt_min: int
    prompt_max: int
    new_tokens: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"text of {self.prompt_max + self.new_tokens:,}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts; their lengths are spread evenly and shuffled."""
        rng = torch.Generator().manual_seed(self.seed)
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.batch).round().long()
        lengths = lengths[torch.randperm(self.batch, generator=rng)]
        return [
            torch.randint(vocab_size, (int(length),), generator=rng).tolist() for length in lengths
        ]


Work = Decode | Text


@attrs.frozen
class Machine:
    """What a machine can do at best.

    Attributes:
        bytes_per_s: Bytes of memory moved in a second.
        products_per_s: Multiplications and additions in a second, each counted.
    """

    bytes_per_s: float
    products_per_s: float


@attrs.frozen
class Measurement:
    """Times and memory of one contender at one work.

    Attributes:
        steps_s: Seconds of each measured decode step, or their mean as the only one, from
            contenders that tell no more.
        kv_bytes: Peak bytes of the cache.
        read_bytes: Bytes of keys and values that a step attends to, the mean over the steps.
        prefill_s: Seconds until the first token of every sequence; ``None`` without a prefill.
        policy_share: Share of the decode time spent on policies; ``None`` if not measured.
        compacted: Compactions of one sequence in one layer in each measured step; ``None`` for
            contenders that do not count them.
        path: How steps were run: ``"static"``, or ``"eager: REASON"``; empty if that is not known.
        machine: What the machine can do, of its limit only.
        device_bytes: Peak bytes allocated on a GPU, the model included; ``None`` without one.
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
        decode: Builds, fills to as many tokens as are held, steps, and measures.
        text: Generates whole texts; ``None`` if it cannot.
        budget: Rows that stay; ``None`` if nothing is evicted.
        references: Names of the contenders with which its speed is compared, by what they are
            called in tables, such as `GENERATE` or `KVPRESS`.
        policy: Policy that gives it its colour in figures; empty for none.
        period: Steps after which its work repeats: those between two compactions of a sequence.
        most_held: The most tokens to which it can be filled in reasonable time.
        has_cache: Whether its speed depends on a cache, and its batch on memory.
        is_outside: Whether it runs in another process, whose memory is not seen.
    """

    name: str
    decode: Callable[[Decode], Measurement]
    text: Callable[[Text], Measurement] | None = None
    budget: float | None = None
    references: Mapping[str, str] = {GENERATE: GENERATE}
    policy: str = ""
    period: int = 1
    most_held: int | None = None
    has_cache: bool = True
    is_outside: bool = False

    def does(self, work: Work) -> bool:
        """Whether it can do this work."""
        if isinstance(work, Text):
            return self.text is not None
        return self.most_held is None or work.held <= self.most_held

    def run(self, work: Work) -> Measurement:
        """Do one work; a multiple of its period is measured, so that compactions count fully."""
        if isinstance(work, Text):
            assert self.text is not None, "the caller asks `does` first"
            return self.text(work)
        periods = -(-work.steps // self.period)
        return self.decode(attrs.evolve(work, steps=periods * self.period))


def synchronized_time(device: torch.device) -> float:
    """Seconds on the performance counter, after all work queued on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def durations(times: Sequence[float]) -> tuple[float, ...]:
    """Seconds between successive times."""
    return tuple(after - before for before, after in pairwise(times))
