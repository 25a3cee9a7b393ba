"""Texts under a plan, on any device, with what is held on the way."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import attrs
import torch
from texts import Rows, Text
from torch import Tensor

from kvpolicy import Engine, Plan, PolicyCache, Request, Sampling, hookimpl
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.engine import Run
from kvpolicy.engine.sampler import teacher_forced

STEPS_PER_READ = 2  # what an engine takes on a GPU
# Products of hundreds of numbers in another order, layer after layer, differ by so much; a number
# of fp32 itself is rounded to 1.2e-7.
NOISE = 1e-6


def samplings(num: int, *, drawn: bool) -> list[Sampling]:
    """Greedy, or another seed for each text."""
    return [Sampling(0.8, top_p=0.95, seed=7 + i) if drawn else Sampling() for i in range(num)]


def generated_texts(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    drawn: bool = False,
) -> tuple[list[Text], list[list[float]], str]:
    """Texts from the engine, log-probabilities of their tokens, and the path of its steps."""
    engine = Engine(model, tokenizer, plan, slots=len(prompts), steps_per_read=STEPS_PER_READ)
    requests = [
        Request(prompt, new_tokens, sampling, logprobs=1)
        for prompt, sampling in zip(prompts, samplings(len(prompts), drawn=drawn), strict=True)
    ]
    run = engine.generate(requests)
    rows: list[dict[int, Rows]] = [{} for _ in prompts]
    results: dict[int, Any] = {}
    while not run.done:
        results |= {result.id: result for result in run.step().results}
        for seq in run.scheduler.decodable:
            rows[seq.id][len(seq.tokens)] = held_rows(run.cache, seq.slot)
    ended = [results[number] for number in range(len(prompts))]
    if errors := [result.error for result in ended if result.error]:
        raise RuntimeError(errors[0])
    texts = [Text(result.tokens, held) for result, held in zip(ended, rows, strict=True)]
    return texts, [_logprobs(result) for result in ended], run.report.path


def texts_without_logprobs(
    model: Any, tokenizer: Any, plan: Plan, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Text]:
    """Texts of which only tokens are asked, so that steps are launched before these are read."""
    engine = Engine(model, tokenizer, plan, slots=len(prompts), steps_per_read=STEPS_PER_READ)
    results = engine.generate([Request(prompt, new_tokens) for prompt in prompts]).results()
    return [Text(result.tokens, {}) for result in results]


def texts_of_generate(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> list[Text]:
    """Texts from transformers' `generate` with a `PolicyCache`, padded on the left."""
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id
    padded = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(padded, device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts],
        device=model.device,
    )
    cache = PolicyCache(model, plan, tokenizer)
    answer = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new_tokens, do_sample=False
    )
    ends = model.generation_config.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    texts = []
    for slot, row in enumerate(answer[:, longest:].tolist()):
        end = next((i + 1 for i, token in enumerate(row) if token in stops), None)
        # A row that has ended gets pads until the others end, which the engine does not compute.
        rows = {} if end else {len(row): held_rows(cache.core.cache, slot)}
        texts.append(Text(row[:end], rows))
    return texts


def forced_logprobs(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[list[float]]:
    """Log-probabilities of given texts, token by token, under a plan."""
    engine = Engine(model, tokenizer, plan, slots=len(prompts))
    requests = [
        Request(prompt, len(text), stop_ids=(), logprobs=1)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    run = _led_along(engine, requests, texts, lambda *_: None)
    return [_logprobs(result) for result in run.results()]


@dataclass
class Replay:
    """A text that was led along given tokens on the CPU, and watched.

    Attributes:
        logits: Before each token, ``[V]``.
        rows: The rows that were held when it had so many tokens.
        compactions: Tokens by then, layer, positions and scores of its rows, ``[H_kv][T]``.
    """

    logits: list[Tensor] = field(default_factory=list)
    rows: dict[int, Rows] = field(default_factory=dict)
    compactions: list[tuple[int, int, list, list]] = field(default_factory=list)


def replayed(
    model: Any,
    tokenizer: Any,
    plan_with: Callable[[object], Plan],
    prompt: Sequence[int],
    tokens: Sequence[int],
    rows: Mapping[int, Rows] | None = None,
) -> Replay:
    """Lead one text along tokens, and note what the policies and the model decide by.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        plan_with: Makes the plan with one more policy.
        prompt: The prompt.
        tokens: The text.
        rows: The rows that are to be held when it has so many tokens, where that is to be left to
            nobody: else a tie before would have other rows compared than those that were.
    """
    watcher, replay = _Watcher(), Replay()
    engine = Engine(model, tokenizer, plan_with(watcher), slots=1)
    request = Request(prompt, len(tokens), stop_ids=())

    def note(_: object, logits: Tensor) -> None:
        replay.logits.append(logits[0].float().cpu())

    run = _led_along(engine, [request], [tokens], note)
    while not run.done:
        watcher.held = (rows or {}).get(1 + max((len(one.tokens) for one in run.active), default=0))
        run.step()
        for seq in run.scheduler.decodable:
            num = len(seq.tokens)
            replay.rows[num] = held_rows(run.cache, seq.slot)
            replay.compactions += [(num, *one) for one in watcher.taken()]
    return replay


def with_noise(model: Any, seed: int) -> Any:
    """Change each weight by about a millionth of itself; returns the model."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=rng))
    return model


def held_rows(cache: KVCache, slot: int) -> Rows:
    """Positions of the rows that a slot holds, of each layer and head."""
    found = [LayerRows(cache, [layer], [slot]).positions[0] for layer in range(len(cache.layers))]
    return [[[p for p in head if p >= 0] for head in one.tolist()] for one in found]


@attrs.define(eq=False)
class _Watcher:
    """A policy that notes the scores by which others choose, and has rows kept that are known.

    Attributes:
        seen: What was noted.
        held: The rows to keep; ``None``: those that others choose.
    """

    ragged: ClassVar[bool] = True
    seen: list = attrs.field(factory=list)
    held: Rows | None = None

    @hookimpl(wrapper=True)
    def select(
        self, layer_idx: int, scores: Tensor, positions: Tensor
    ) -> Generator[None, Tensor, Tensor]:
        self.seen.append((layer_idx, positions[0].tolist(), scores[0].tolist()))
        keep = yield
        if self.held is None or keep is None:
            return keep
        known = torch.zeros_like(positions, dtype=torch.bool)
        for head, held in enumerate(self.held[layer_idx]):
            known[0, head] = torch.isin(positions[0, head], torch.tensor(held, dtype=torch.int64))
        if keep.dtype == torch.bool:
            return known if known.sum() == keep.sum() else keep
        # Of a prompt, later compactions may have taken some of these.
        is_whole = bool((known.sum(dim=-1) == keep.shape[-1]).all())
        return known[0].nonzero()[:, 1].reshape(keep.shape) if is_whole else keep

    def taken(self) -> list[tuple[int, list, list]]:
        """What was noted since the last call."""
        seen, self.seen[:] = [*self.seen], []
        return seen


def _led_along(
    engine: Engine,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    note: Callable[[Sequence[Any], Tensor], None],
) -> Run:
    def next_tokens(sequences: Sequence[Any], logits: Tensor) -> Tensor:
        note(sequences, logits)
        return teacher_forced([texts[seq.id][len(seq.tokens)] for seq in sequences], logits)

    return Run(engine, requests, next_tokens)


def _logprobs(result: Any) -> list[float]:
    return [round(one.logprob, 5) for one in result.logprobs]
