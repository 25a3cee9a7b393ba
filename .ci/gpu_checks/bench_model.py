"""The model whose speed is measured, and decode steps of texts that are filled in at once."""

from dataclasses import dataclass
from typing import Any

import torch

from kvpolicy import Plan
from kvpolicy.lab.bench.models import SHAPES, random_model


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        shape: Name of a shape of ``kvpolicy bench``.
        dtype: Precision.
        held: Tokens that each text has.
        budget: Rows that stay.
        buffer: Rows that may join them.
        work: In order: decode steps of so many sequences, prefills of so many tokens.
    """

    shape: str
    dtype: str
    held: int
    budget: int
    buffer: int
    work: tuple[tuple[str, int], ...]


# 8,704 tokens are the mean of a text that grows to 16,384 after a prompt of 1,024.
FULL = Setting(
    *("qwen3-8b", "bfloat16", 8704, 1024, 128),
    work=(
        *(("steps", 32), ("prefill", 4096), ("steps", 1), ("steps", 128)),
        *(("prefill", 32768), ("steps", 256)),
    ),
)
QUICK = Setting(
    *("tiny", "float32", 64, 32, 8), work=(("steps", 2), ("prefill", 96), ("prefill", 128))
)

# Steps for which there is room beside those that are held.
SPARE = 256

# Tokens that end sentences, which SkipKV reads from a tokenizer where there is one.
_STACKS: dict[str, object] = {"skipkv": {"policy": "skipkv", "delimiters": [198, 271]}}


def plan_named(name: str, setting: Setting) -> Plan:
    """The plan of a policy."""
    if name == "full":
        return Plan.uniform("full")
    stack = _STACKS.get(name, name)
    return Plan.uniform(stack, budget=setting.budget, buffer=setting.buffer)


def model_of(setting: Setting, device: torch.device) -> Any:
    """The model, with random weights, made on its device."""
    prompts = [num for kind, num in setting.work if kind == "prefill"]
    longest = max(*prompts, setting.held) + 1024
    return random_model(
        SHAPES[setting.shape],
        0,
        max_positions=longest,
        dtype=setting.dtype,
        device=str(device),
    )


def rows_in(plan_name: str, setting: Setting) -> int:
    """Rows of a slab of one sequence: those of all tokens without a budget."""
    return setting.held + SPARE if plan_name == "full" else setting.budget + setting.buffer
