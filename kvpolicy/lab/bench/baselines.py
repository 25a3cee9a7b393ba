"""Baselines measured in the same process: ``generate``, the model alone, and kvpress.

A policy is compared with the press of its name: ``x_y`` with ``XYPress``. Knobs with equal names
have equal values. While decoding, kvpress compresses every ``compression_interval`` steps, with a
``DecodingPress`` around such a press.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvpolicy.errors import error_summary
from kvpolicy.lab.bench.contender import (
    Contender,
    Measurement,
    Prompts,
    durations,
    synchronized_time,
)
from kvpolicy.lab.sweep.grid import Cell

GENERATE = "generate"
MODEL_ALONE = "model alone"
KVPRESS = "kvpress"

_NUM_ALONE_STEPS = 64  # all steps take the same time


def generate(model: PreTrainedModel) -> Contender:
    """``generate`` of transformers with the full cache."""
    return Contender(GENERATE, _timed_generate(model, nullcontext))


def model_alone(model: PreTrainedModel) -> Contender:
    """The model on one token of each sequence, without a cache: an upper bound on speed.

    Each token attends to itself only, so that everything but attention over a cache is measured.
    """

    @torch.inference_mode()
    def run(prompts: Prompts, new_tokens: int) -> Measurement:
        token_ids = torch.tensor([prompt[:1] for prompt in prompts], device=model.device)
        times = []
        for _ in range(min(new_tokens, _NUM_ALONE_STEPS)):
            logits = model(input_ids=token_ids, use_cache=False).logits
            token_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            times.append(synchronized_time(model.device))
        return Measurement(None, durations(times[1:]), kv_bytes=0, read_bytes=0)

    return Contender(MODEL_ALONE, run)


def presses_for(
    model: PreTrainedModel, cells: Sequence[Cell]
) -> tuple[dict[str, Contender], str | None]:
    """Find the press of each cell's policy.

    Args:
        model: The model.
        cells: The engine's plans.

    Returns:
        The presses by digest of the cell with the same policy, and the reason if there are none.
    """
    try:
        import kvpress

        _check_transformers()
    except ImportError as error:
        return {}, (
            f"{KVPRESS} cannot be imported ({error_summary(error)}); in a new environment, from a "
            "clone of kvpolicy: pip install -e '.[benchmarks]'"
        )
    presses = {
        cell.digest: press
        for cell in cells
        if (press := _press_for(kvpress, model, cell)) is not None
    }
    if not presses:
        return {}, f"{KVPRESS} has no press with the name of one of these policies"
    # Plans that differ only in knobs have presses with the same name.
    counts = Counter(press.name for press in presses.values())
    for cell in cells:
        press = presses.get(cell.digest)
        if press is not None and counts[press.name] > 1:
            presses[cell.digest] = attrs.evolve(press, name=f"{press.name} ({cell.series})")
    return presses, None


def left_pad(prompts: Prompts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left: token ids and attention mask, ``[B, columns]`` each."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    token_ids, mask = (
        pad_sequence(part, batch_first=True, padding_side="left")
        for part in (rows, [torch.ones_like(row) for row in rows])
    )
    return token_ids, mask


def _timed_generate(
    model: PreTrainedModel, context: Callable[[], AbstractContextManager[None]]
) -> Callable[[Prompts, int], Measurement]:
    """Run ``generate`` greedily within a context and time each token.

    Args:
        model: A model without an end-of-sequence token.
        context: Creates the context.
    """

    def run(prompts: Prompts, new_tokens: int) -> Measurement:
        token_ids, mask = left_pad(prompts, model.device)
        cache = DynamicCache(config=model.config)
        timer = _TokenTimer(cache, len(prompts), model.device)
        call: Any = model.generate
        with torch.inference_mode(), context():
            start = synchronized_time(model.device)
            call(
                token_ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([timer]),
            )
        # A step attends to the rows before it and to its own.
        attended = [held + timer.row_bytes for held in timer.held_bytes[:-1]]
        return Measurement(
            prefill_s=timer.times[0] - start,
            steps_s=durations(timer.times[1:]),
            kv_bytes=max(attended),
            read_bytes=sum(attended[1:]),
        )

    return run


class _TokenTimer(StoppingCriteria):
    """Records time and cache size at each token; never stops a sequence."""

    def __init__(self, cache: DynamicCache, batch: int, device: torch.device) -> None:
        self.times: list[float] = []
        self.held_bytes: list[int] = []
        self._cache = cache
        self._none_stopped = torch.zeros(batch, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(synchronized_time(self._none_stopped.device))
        self.held_bytes.append(sum(one.nbytes for one in self._tensors()))
        return self._none_stopped

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of every sequence."""
        return sum(one.nbytes // one.shape[2] for one in self._tensors())

    def _tensors(self) -> list[Any]:
        layers: list[Any] = list(self._cache.layers)
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _check_transformers() -> None:
    """Raise `ImportError` if the installed kvpress needs another transformers: it fails late."""
    from packaging.requirements import Requirement  # installed with kvpress

    try:
        lines = requires(KVPRESS) or ()
    except PackageNotFoundError:
        return
    installed = version("transformers")
    for requirement in map(Requirement, lines):
        if requirement.name == "transformers" and not requirement.specifier.contains(
            installed, prereleases=True
        ):
            msg = f"it needs {requirement}, and {installed} is installed"
            raise ImportError(msg)


def _press_for(library: Any, model: PreTrainedModel, cell: Cell) -> Contender | None:
    """The press for a plan that has the same single policy in all layers."""
    layer = cell.resolved.layers[0]
    if any(attrs.evolve(one, layer_idx=0) != layer for one in cell.resolved.layers):
        return None
    if len(layer.stack) != 1 or layer.budget is None or not layer.bounded:
        return None
    (spec,) = layer.stack
    names = {name.casefold(): name for name in dir(library)}
    press: Any = getattr(library, names.get(f"{spec.policy.replace('_', '')}press", ""), None)
    if not isinstance(press, type) or not issubclass(press, library.ScorerPress):
        return None
    fields = {field.name for field in dataclasses.fields(press)}
    knobs = {name: value for name, value in spec.knobs.items() if name in fields}
    budget, interval = layer.budget, layer.buffer

    def decoding() -> AbstractContextManager[None]:
        press_while_decoding = library.DecodingPress(
            base_press=press(**knobs), compression_interval=interval, target_size=budget
        )
        context: AbstractContextManager[None] = press_while_decoding(model)
        return context

    return Contender(
        f"{KVPRESS} {press.__name__}", _timed_generate(model, decoding), budget, policy=spec.policy
    )
