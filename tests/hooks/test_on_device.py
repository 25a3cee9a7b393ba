"""What must hold wherever a model is, `--device cuda` included: what hooks receive and answer."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import HookResultError

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [3, 8] * 9]


def generate(policy: object, device: torch.device) -> list[Any]:
    model = tiny_model("qwen3", head_dim=16).to(device)
    engine = Engine(model, plan=Plan.uniform(policy, budget=8, buffer=4), slots=2)
    return engine.generate(PROMPTS, max_new_tokens=20).results()


@attrs.define(eq=False)
class Marks:
    """Writes each row's position to a track, and keeps other rows of every head."""

    tracks: ClassVar[tuple[str, ...]] = ("mark",)
    devices: set[str] = attrs.field(factory=set)
    num_marked: int = 0

    @hookimpl
    def score(
        self, keys: Tensor, attn_sums: Tensor, positions: Tensor, seq_len: Tensor, tracks: Any
    ) -> Tensor:
        assert seq_len.device.type == "cpu"
        self.devices |= {one.device.type for one in (keys, attn_sums, positions, tracks["mark"])}
        marks = tracks["mark"]
        assert bool(((marks == 0) | (marks == positions + 1)).all())
        self.num_marked += int((marks > 0).sum())
        tracks["mark"] = positions.float() + 1
        heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
        return ((positions * 7 + heads * 3) % 11).float()


def test_tensors_are_on_the_device_and_tracks_move_with_rows(device: torch.device) -> None:
    marks = Marks()
    generate(marks, device)
    assert marks.devices == {device.type}
    assert marks.num_marked > 0


@attrs.define(eq=False)
class WrongScores:
    """Scores with NaN, which can be seen on the device only."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions.float().masked_fill(positions == 2, torch.nan)


def test_a_wrong_value_on_the_device_names_the_policy(device: torch.device) -> None:
    with pytest.raises(HookResultError, match="wrong_scores"):
        generate(WrongScores(), device)
