"""Soak test: many short requests, cancellations and failing policies; nothing may leak.

    python docs/benchmarks/soak.py                 # 10,000 requests
    python docs/benchmarks/soak.py --requests 1000 --output /tmp/soak

Waves of requests run on engines with different plans, each of which has different policies per
layer. Some requests are cancelled at random; for some, a policy fails on purpose, in every hook
and in several ways. After each wave, every request must have exactly one result and every slot
must be empty. Some requests are generated again, alone and without failures, and must have the
same tokens.

Prints counts as JSON; with --output, writes `soak.json` and `soak.png` into that folder.
"""

import argparse
import gc
import json
import re
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy import Engine, Memory, Plan, Request, Result, Run, hookimpl
from kvpolicy.cli.output import Progress

VOCAB = 61
NUM_LAYERS = 3
MARK = VOCAB - 1  # first token of the prompts for which a policy fails
SLOTS = 8
WAVE = 125
DELIMITERS = [3, 11, 19]
PLANS: dict[str, list[list[Any]]] = {  # by layer
    "full, h2o, rkv": [["full"], ["h2o", "protect"], ["rkv", "protect"]],
    "snapkv, streaming, h2o": [["snapkv", "protect"], ["streaming"], ["h2o"]],
    "skipkv, rkv, skipkv": [
        [{"policy": "skipkv", "delimiters": DELIMITERS, "tau": 0.3}, "protect"],
        ["rkv", "protect"],
        ["h2o", {"policy": "skipkv", "delimiters": DELIMITERS, "tau": 0.3}, "protect"],
    ],
    "streaming, full, snapkv": [["streaming"], ["full"], ["snapkv", "protect"]],
}


@attrs.define(eq=False)
class Failing:
    """Changes nothing, but fails for marked prompts: their second token selects the hook."""

    armed: bool = True
    HOOKS = ("observe", "steer", "score", "select", "evict", "NaN", "shape", "poison")

    @hookimpl
    def observe(self, token_ids: Tensor, start: int, memory: Memory) -> None:
        (notes,) = memory.of(self)
        if start == 0:
            notes["how"] = how_it_fails(token_ids.tolist())
        elif self._meets("observe", memory):
            raise ValueError

    @hookimpl
    def steer(self, memory: Memory) -> None:
        if self._meets("steer", memory):
            raise KeyError

    @hookimpl
    def due(self, seq_len: Tensor, prompt_len: Tensor) -> None:
        if self.armed and ((prompt_len == 37) & (seq_len == 57)).any():
            raise OverflowError

    @hookimpl(wrapper=True)
    def score(self, memory: Memory) -> Generator[None, Tensor, Tensor]:
        scores = yield
        if self._meets("score", memory):
            raise IndexError
        if self._meets("NaN", memory):
            return scores * torch.nan
        return scores[:, :, 1:] if self._meets("shape", memory) else scores

    @hookimpl
    def select(self, scores: Tensor, memory: Memory) -> Tensor | None:
        return scores.argsort(dim=2) if self._meets("select", memory) else None

    @hookimpl
    def evict(self, rows: Any, keep: Tensor, memory: Memory) -> bool | None:
        if self._meets("evict", memory):
            rows.keep(keep[:, :, 1:])
            raise RuntimeError
        if self._meets("poison", memory):
            marked = torch.tensor([notes["how"] == "poison" for notes in memory.of(self)])
            wide = keep[..., None].expand(-1, -1, -1, rows.values.shape[-1])
            values = rows.values.gather(2, wide)
            values[marked] = torch.nan
            rows.keep(keep, values=values)
            return True
        return None

    def _meets(self, how: str, memory: Memory) -> bool:
        return self.armed and any(notes["how"] == how for notes in memory.of(self))


@attrs.define(eq=False)
class FailsAtTheEnd:
    """Admits requests in order of arrival, and fails when two are left."""

    armed: bool = True

    @hookimpl
    def schedule(self, waiting: Any) -> None:
        if self.armed and len(waiting) == 2:
            raise LookupError


def how_it_fails(prompt: list[int]) -> str | None:
    """The failure that the first two tokens of a prompt select; ``None`` for most prompts."""
    marked = len(prompt) > 1 and prompt[0] == MARK
    return Failing.HOOKS[prompt[1] % len(Failing.HOOKS)] if marked else None


def small_model() -> LlamaForCausalLM:
    """Random weights, large enough that tokens depend on the whole prompt; double precision."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).double().eval()


def engines(model: LlamaForCausalLM, name: str) -> tuple[Engine, Engine]:
    """The engine under test, and one in which nothing fails."""
    built = []
    for armed in (True, False):
        failing, last = Failing(armed), FailsAtTheEnd(armed)
        data = {"budget": 16, "buffer": 5, "layers": []}
        data["layers"] = [{"where": [i], "stack": one} for i, one in enumerate(PLANS[name])]
        plan = Plan.from_dict(data)
        mine = Plan.uniform(failing, schedule=[last])
        layers = [attrs.evolve(one, stack=(*one.stack, *mine.stack)) for one in plan.layers]
        plan = attrs.evolve(plan, layers=tuple(layers), schedule=mine.schedule)
        built.append(Engine(model, plan=plan, slots=SLOTS, chunk=16, on_hook_error="answer"))
    return built[0], built[1]


@attrs.define
class Sample:
    """Memory of the process at one moment."""

    requests: int
    rss_bytes: int
    tensors: int
    tensor_bytes: int


@attrs.define
class Soak:
    """Runs waves of requests and checks the result of each wave."""

    num_requests: int
    wave: int = WAVE
    check_every: int = 20
    reasons: Counter[str] = attrs.field(factory=Counter)
    failures: Counter[str] = attrs.field(factory=Counter)
    tokens: int = 0
    checked: int = 0
    samples: list[Sample] = attrs.field(factory=list)
    under_way: list[Sample] = attrs.field(factory=list)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of requests answered, after every wave."""
        model = small_model()
        pairs = [engines(model, name) for name in PLANS]
        rng = torch.Generator().manual_seed(0)
        done = 0
        for number, first in enumerate(range(0, self.num_requests, self.wave)):
            requests = [_request(rng) for _ in range(min(self.wave, self.num_requests - first))]
            soaked, healthy = pairs[number % len(pairs)]
            self._wave(soaked, healthy, requests, rng)
            done += len(requests)
            self.samples.append(measure(done))
            yield done

    def _wave(
        self, soaked: Engine, healthy: Engine, requests: list[Request], rng: torch.Generator
    ) -> None:
        run = soaked.generate(requests)
        results: list[Result] = []
        while not run.done:
            if not int(torch.randint(10, (), generator=rng)):
                run.cancel(int(torch.randint(len(requests), (), generator=rng)))
            before = len(results)
            results += run.step().results
            if before < len(requests) // 2 <= len(results):
                answered = sum(self.reasons.values()) + len(results)
                self.under_way.append(measure(answered))
        assert sorted(one.id for one in results) == list(range(len(requests))), "not once each"
        assert_empty(run)
        for result in results:
            self.reasons[result.finish_reason] += 1
            self.tokens += len(result.tokens)
            if result.error is not None:
                self.failures[_kind(result.error)] += 1
        for result in results[:: self.check_every]:
            request = requests[result.id]
            (alone,) = healthy.generate([request]).results()
            assert result.tokens == alone.tokens[: len(result.tokens)], "other tokens"
            whole = result.finish_reason in ("stop", "length")
            assert not whole or result.tokens == alone.tokens, "tokens are missing"
            self.checked += 1


def _kind(error: str) -> str:
    """The kind of an error: its message without the policy and numbers."""
    what = error.partition(" at layer")[0].partition("()")[0].split("' ", 1)[1]
    what = re.sub(r"\d+ of \d+ ", "", what)
    return re.sub(r" \[[\d, ]+\]; expected .*?(?=, in )", "", what)


def _request(rng: torch.Generator) -> Request:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    prompt = torch.randint(MARK, (number(1, 41),), generator=rng).tolist()
    if not number(0, 40):
        prompt[0] = MARK
    return Request(prompt, max_new_tokens=number(1, 25), stop_ids=(number(0, VOCAB),))


def assert_empty(run: Run) -> None:
    """Assert that every slot is free and empty."""
    cache = run.cache
    assert run.scheduler.slots.num_free == cache.num_slots, "a slot is lost"
    assert not cache.rows.any(), "rows are left"
    assert not cache.seq_len.any(), "a sequence is left"
    assert all((layer.positions == -1).all() for layer in cache.layers), "positions are left"


def measure(requests: int) -> Sample:
    """Resident memory, and all tensors that the garbage collector tracks."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when their class is read
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    return Sample(requests, resident_bytes(), len(tensors), size)


def resident_bytes() -> int:
    """Resident memory of this process; its peak where the current value is not available."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def draw(soak: Soak, path: Path) -> None:
    """Plot memory against requests."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = (
        (left, "Resident memory, MiB", lambda one: one.rss_bytes / 2**20),
        (right, "Tensors, KiB", lambda one: one.tensor_bytes / 2**10),
    )
    series = (
        ("run under way", soak.under_way, "#D55E00"),
        ("between runs", soak.samples, "#0072B2"),
    )
    for axes, title, of in panels:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#333333")
        axes.set_xlabel("requests answered")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        for label, samples, colour in series:
            x = [one.requests for one in samples]
            axes.plot(x, [of(one) for one in samples], ".-", color=colour, linewidth=1, label=label)
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(frameon=False, loc="lower right", ncols=2)
    figure.savefig(path, dpi=160)


def figures(soak: Soak) -> dict[str, Any]:
    """Counts and memory of the run; growth is measured after the first wave of every plan."""
    first, last = soak.samples[min(len(PLANS), len(soak.samples)) - 1], soak.samples[-1]
    return {
        "requests": sum(soak.reasons.values()),
        "tokens": soak.tokens,
        "reasons": dict(soak.reasons),
        "failures": dict(soak.failures.most_common()),
        "checked alone": soak.checked,
        "rss_mib": [round(one.rss_bytes / 2**20, 1) for one in (first, last)],
        "rss_mib_max": round(max(one.rss_bytes for one in soak.under_way) / 2**20, 1),
        "tensors": [first.tensors, last.tensors],
        "tensor_bytes": [first.tensor_bytes, last.tensor_bytes],
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="folder for soak.json and soak.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(given.requests)
    with Progress(given.requests) as progress:
        for done in soak:
            now = soak.samples[-1]
            line = f"{now.rss_bytes / 2**20:.0f} MiB resident, {now.tensors} tensors"
            progress.update(line, done)
    found = figures(soak)
    print(json.dumps(found, indent=1))
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        samples = {"between": soak.samples, "under_way": soak.under_way}
        kept = {name: [attrs.asdict(one) for one in ones] for name, ones in samples.items()}
        (given.output / "soak.json").write_text(json.dumps(found | kept) + "\n")
        draw(soak, given.output / "soak.png")


if __name__ == "__main__":
    main()
