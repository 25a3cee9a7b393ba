"""Stage 3: tokens and kept rows of every policy, beside those that a CPU computed before."""

import without_numba  # noqa: F401, I001 - before what imports Numba

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import stage_report
from stage_report import Report
from workload import DRAWN, FULL, GENERATED, QUICK, Sizes, plan_named, prompts_of

# In bf16 a number has 8 bits, and a GPU and a CPU round different sums. Both differ from fp32, by
# as much in the mean: a plan's mean is of a few thousand tokens, and of few others where a row more
# or less matters, so that it may be some times the CPU's; that of all plans is steadier.
MOST_OF_A_PLAN = (3.0, 0.02)  # times the CPU's deviation, and nats beside
MOST_OF_ALL = (1.5, 0.002)

_NOISE_DRAWS = 6  # for a text whose rows part
_MOST_UNEXCUSED = 3  # texts of one plan; then it has failed, and no more are looked into

# Processes, each with one plan at a time: starting them, importing torch and capturing graphs takes
# longer than the card does. A rehearsal has one core.
_WORKERS = {"cuda": 12, "cpu": 1}


@dataclass
class Checked:
    """What was found under one plan."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def stage(report: Report) -> None:
    """Compare all plans, several at a time."""
    expected = json.loads(Path(os.environ["KVPOLICY_EXPECTED"]).read_text(encoding="utf-8"))
    names = list(expected["plans"])
    report.say(f"expected: computed with {expected['versions']}")
    deviations: list[tuple[float, float]] = []
    started = time.monotonic()
    num_workers = min(_WORKERS[report.device], len(os.sched_getaffinity(0)), len(names))
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        asked = [(name, expected["plans"][name], report.device, report.quick) for name in names]
        for checked in pool.map(checked_plan, *zip(*asked, strict=True)):
            report.note(checked.name, checked.figures, _line(checked))
            for failure in checked.failures:
                report.fail(f"{checked.name}: {failure}")
            if "bf16" in checked.figures:
                deviations.append((checked.figures["bf16"], checked.figures["bf16_cpu"]))
    if deviations:
        here, on_cpu = (sum(column) / len(column) for column in zip(*deviations, strict=True))
        line = f"bf16, all plans: {here:.5f} nats from fp32, the CPU {on_cpu:.5f}"
        report.note("bf16", {"here": here, "cpu": on_cpu}, line)
        if not within(here, on_cpu, MOST_OF_ALL):
            report.fail(line)
    report.note("seconds", time.monotonic() - started)


def within(here: float, on_cpu: float, most: tuple[float, float]) -> bool:
    """Whether a deviation is as that of a CPU, but for a factor and a small number."""
    factor, beside = most
    return here <= factor * on_cpu + beside


def checked_plan(name: str, expected: dict[str, Any], device: str, quick: bool) -> Checked:
    """Compare one plan; in a process of its own. What raises is a failure of this plan only."""
    import torch

    torch.set_num_threads(1)
    checked = Checked(name)
    started = time.monotonic()
    parts = [("greedy", _check_greedy), ("bf16", _check_bf16)]
    parts += [("drawn", _check_drawn)] if name in DRAWN else []
    if name in GENERATED:
        parts += [("ahead", _check_ahead), ("generate", _check_generate)]
    parts += [("compactions", _check_compactions)] if name == "h2o" and device == "cuda" else []
    work = _Work(name, expected, device, QUICK if quick else FULL)
    for part, check in parts:
        try:
            check(work, checked)
        except Exception as error:  # whatever breaks on another device
            checked.failures.append(f"{part}: {type(error).__name__}: {error}".splitlines()[0])
    checked.figures["seconds"] = round(time.monotonic() - started, 2)
    return checked


class _Work:
    """The model, on the device and on the CPU, and the texts."""

    def __init__(self, name: str, expected: dict[str, Any], device: str, sizes: Sizes) -> None:
        import torch
        from kvpolicy_reasoner.model import load_reasoner

        self.name, self.expected, self.sizes = name, expected, sizes
        self.device = torch.device(device)
        model, self.tokenizer = load_reasoner()
        self.model = model.to(self.device)
        self.prompts = prompts_of(self.tokenizer, sizes)
        self.plan = plan_named(name, sizes)

    def in_bfloat16(self) -> Any:
        """Another copy of the model."""
        import torch
        from kvpolicy_reasoner.model import load_reasoner

        return load_reasoner()[0].to(device=self.device, dtype=torch.bfloat16)

    def replay(
        self, number: int, found: Any, tokens: Sequence[int], text: Any, seed: int | None = None
    ) -> Any:
        """One text again, on the CPU of this machine, until it parts; with noise of a seed."""
        from decoding import replayed, with_noise
        from kvpolicy_reasoner.model import load_reasoner

        def plan_with(watcher: object) -> Any:
            return plan_named(self.name, self.sizes, watcher)

        model, tokenizer = load_reasoner()
        if seed is not None:
            with_noise(model, seed)
        # Up to there the GPU has held what is expected.
        rows = {num: held for num, held in text.rows.items() if num <= found.before}
        tokens = tokens[: found.after + 1]
        return replayed(model, tokenizer, plan_with, self.prompts[number], tokens, rows)


def _check_greedy(work: _Work, checked: Checked) -> None:
    from decoding import generated_texts

    texts, _, path = generated_texts(
        work.model, work.tokenizer, work.plan, work.prompts, work.sizes.new_tokens
    )
    checked.figures["path"] = path
    _compare("greedy", work, checked, texts, work.expected["greedy"], drawn=False)


def _check_drawn(work: _Work, checked: Checked) -> None:
    from decoding import generated_texts

    texts, _, _ = generated_texts(
        work.model, work.tokenizer, work.plan, work.prompts, work.sizes.new_tokens, drawn=True
    )
    _compare("drawn", work, checked, texts, work.expected["drawn"], drawn=True)


def _check_ahead(work: _Work, checked: Checked) -> None:
    from decoding import texts_without_logprobs

    texts = texts_without_logprobs(
        work.model, work.tokenizer, work.plan, work.prompts, work.sizes.new_tokens
    )
    _compare("ahead", work, checked, texts, work.expected["greedy"], drawn=False)


def _check_generate(work: _Work, checked: Checked) -> None:
    from decoding import texts_of_generate

    most = work.sizes.generated
    texts = texts_of_generate(work.model, work.tokenizer, work.plan, work.prompts, most)
    beginnings = [_beginning(text, most) for text in work.expected["greedy"]]
    _compare("generate", work, checked, texts, beginnings, drawn=False)


def _beginning(text: dict[str, Any], most: int) -> dict[str, Any]:
    return {"tokens": text["tokens"][:most], "rows": text["rows"]}


def _check_bf16(work: _Work, checked: Checked) -> None:
    from decoding import forced_logprobs
    from texts import deviation

    tokens = [text["tokens"] for text in work.expected["greedy"]]
    model = work.in_bfloat16()
    found = forced_logprobs(model, work.tokenizer, work.plan, work.prompts, tokens)
    here, on_cpu = deviation(found, work.expected["logprobs"]), work.expected["bf16_deviation"]
    checked.figures |= {"bf16": here, "bf16_cpu": on_cpu}
    if not within(here, on_cpu, MOST_OF_A_PLAN):
        checked.failures.append(f"bf16: {here:.5f} nats from fp32, the CPU {on_cpu:.5f}")


def _check_compactions(work: _Work, checked: Checked) -> None:
    from kvpolicy.lab.bench.diagnostics.checks import check_compactions

    check_compactions(work.device)
    checked.figures["compactions"] = 1000


def _compare(
    part: str,
    work: _Work,
    checked: Checked,
    texts: Sequence[Any],
    expected: Sequence[dict[str, Any]],
    *,
    drawn: bool,
) -> None:
    """Texts must be equal, or part where both sides were equal but for rounding."""
    from texts import parting

    parted = [
        (number, found)
        for number, (wanted, text) in enumerate(zip(expected, texts, strict=True))
        if (found := parting(wanted, text)) is not None
    ]
    ties: list[str] = []
    unexcused: list[str] = []
    for number, found in parted:
        if len(unexcused) == _MOST_UNEXCUSED:
            break
        words, is_excused = _judged(
            work, number, found, expected[number], texts[number], drawn=drawn
        )
        (ties if is_excused else unexcused).append(f"text {number}: {words}")
    checked.failures += [f"{part}, {words}" for words in unexcused]
    checked.figures[part] = {
        "texts": len(texts),
        "equal": len(texts) - len(parted),
        "tokens": sum(len(text.tokens) for text in texts),
        "rows_seen": sum(len(text.rows) for text in texts),
        "ties": ties,
    }


def _judged(
    work: _Work, number: int, found: Any, expected: dict[str, Any], text: Any, *, drawn: bool
) -> tuple[str, bool]:
    """Where a text parts and how near both sides were, and whether rounding excuses it."""
    from decoding import samplings
    from ties import gap_at, noise_moves_as_much

    tokens, prompt_len = expected["tokens"], len(work.prompts[number])
    sampling = samplings(work.sizes.num_texts, drawn=drawn)[number]
    replay = work.replay(number, found, tokens, text)
    gap, most = gap_at(found, expected, text, replay, sampling, prompt_len)
    words = f"{found.kind} after {found.after} tokens, gap {gap:.1e}"
    if gap <= most:
        return words, True
    if found.kind == "rows" and found.after in replay.rows:
        noisy: list[Any] = []
        for seed in range(_NOISE_DRAWS):
            noisy.append(work.replay(number, found, tokens, text, seed))
            if noise_moves_as_much(found, text, replay, noisy):
                return f"{words}, no more than noise makes", True
    return f"{words}, more than {most:.0e}", False


def _line(checked: Checked) -> str:
    figures = checked.figures
    parts = [
        f"{part} {found['equal']}/{found['texts']}" + "".join(f" ({tie})" for tie in found["ties"])
        for part in ("greedy", "ahead", "drawn", "generate")
        if (found := figures.get(part))
    ]
    if "bf16" in figures:
        parts.append(f"bf16 {figures['bf16']:.5f} (CPU {figures['bf16_cpu']:.5f})")
    return f"{checked.name:21} {'; '.join(parts)}; {figures.get('path')}; {figures['seconds']} s"


if __name__ == "__main__":
    stage_report.main("tokens", stage)
