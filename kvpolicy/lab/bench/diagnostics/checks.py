"""Checks that must hold on a device before its speed counts."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.engine.engine import Engine
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.lab.bench.workload import Text
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series
from kvpolicy.model.loading import move

TEXT = Text(batch=2, prompt_min=5, prompt_max=40, new_tokens=32)
_BUDGET, _BUFFER = 16, 8  # rows: every sequence is compacted several times
_HEADS, _HEAD_DIM, _ROWS, _KEPT, _SLOTS = 4, 64, 640, 512, 8


def check_tokens(device: torch.device, cells: Sequence[Cell]) -> None:
    """Generate with a small model under each policy, and compare the tokens with those of the CPU.

    Args:
        device: The device, whose kernels store, attend, compact and draw.
        cells: Plans; those for the small model have their policies.

    Raises:
        KVPolicyError: A token differs.
    """
    shape = SHAPES["tiny"]
    on_cpu = random_model(shape, 0, max_positions=256)
    on_device = move(random_model(shape, 0, max_positions=256), str(device))
    for cell in cells:
        # Not their rows in integers: rounded in another order, a number may get another code.
        stack = cell.resolved.to_dict()["layers"][0]["stack"]
        (small,) = build_cells(
            [Series(cell.series, {"stack": stack})],
            num_layers=shape.num_layers,
            budgets=[_BUDGET],
            buffer=_BUFFER,
        )
        wanted, found = (_tokens(model, small) for model in (on_cpu, on_device))
        if found != wanted:
            msg = (
                f"under {cell.series} the tokens on {device} are not those of the CPU: a defect of "
                "kvpolicy's kernels or of the device's driver, or two that are equally good"
            )
            raise KVPolicyError(msg)


def _tokens(model: PreTrainedModel, cell: Cell) -> list[tuple[int, ...]]:
    prompts = TEXT.prompts(model.config.vocab_size)
    engine = Engine(model, None, cell.resolved, slots=TEXT.batch)
    run = engine.generate(prompts, max_new_tokens=TEXT.new_tokens, stop_ids=())
    return [result.tokens for result in run.results()]


def check_compactions(device: torch.device, *, repeats: int = 1000) -> None:
    """Compact slabs many times and compare every row with a plain gather.

    Compactions move rows within a slab. Where programs run at the same time, a row could be
    overwritten before it is read: shifts by a single row are where that would show.

    Args:
        device: The device.
        repeats: Compactions.

    Raises:
        KVPolicyError: A row differs.
    """
    rng = torch.Generator().manual_seed(0)
    shape = LayerShape(_HEADS, _HEADS, _HEAD_DIM, torch.float32, device)
    cache = KVCache([shape], [Slab(_ROWS)], _SLOTS)
    layer = cache.layers[0]
    drawn = torch.randn(2, *layer.keys.shape, generator=rng).to(device)
    for repeat in range(repeats):
        for slab, rows in zip((layer.keys, layer.values), drawn, strict=True):
            slab.copy_(rows)
        layer.positions.copy_(torch.arange(_ROWS, device=device).expand_as(layer.positions))
        cache.rows[:], cache.seq_len[:] = _ROWS, _ROWS
        kept = _choices(repeat, rng).to(device)
        LayerRows(cache, 0, range(_SLOTS)).keep(kept)
        index = kept[..., None].expand(-1, -1, -1, _HEAD_DIM)
        for slab, rows in zip((layer.keys, layer.values), drawn, strict=True):
            if not torch.equal(slab[:, :, :_KEPT], rows.gather(2, index)):
                msg = (
                    f"compaction {repeat} on {device} lost rows: a defect of kvpolicy or of the "
                    "device's driver"
                )
                raise KVPolicyError(msg)


def _choices(repeat: int, rng: torch.Generator) -> Tensor:
    """Rows that stay, ``[S, H_kv, K]``: a shift by one row, or rows drawn for each head."""
    if repeat % 2 == 0:
        return torch.arange(1, _KEPT + 1).expand(_SLOTS, _HEADS, _KEPT)
    order = torch.rand(_SLOTS, _HEADS, _ROWS, generator=rng).argsort(dim=-1)
    return order[..., :_KEPT].sort(dim=-1).values
