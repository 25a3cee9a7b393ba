"""The one place where layouts are named: what a layer and a plan want becomes a layout.

A layout that no layer needs is not imported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpolicy.cache.arena import Arena
from kvpolicy.cache.counts import Counts
from kvpolicy.cache.layouts.base import Layout, RowLayout
from kvpolicy.cache.layouts.even import Even
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.features import feature

_LAYOUTS = "kvpolicy.cache.layouts."


def layouts_of(shapes: Sequence[LayerShape], slabs: Sequence[Slab], counts: Counts) -> list[Layout]:
    """The layout of each layer; layers of one kind share theirs.

    Args:
        shapes: Shape of each layer.
        slabs: What each of them is to store for a slot.
        counts: What the host will know of the slots.
    """
    kinds = [_kind(*pair) for pair in zip(shapes, slabs, strict=True)]
    made: dict[object, Layout] = {kind: _made(*kind, counts) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def states_of(
    shapes: Sequence[LayerShape], num_slots: int
) -> tuple[Sequence[Arena], Mapping[int, Any]]:
    """Memory for the states of fixed size of all slots, and those of each layer that has any."""
    if not any(shape.states for shape in shapes):
        return [], {}
    allocate = feature(_LAYOUTS + "states", "allocate", "layers with states of fixed size")
    found: tuple[Sequence[Arena], Mapping[int, Any]] = allocate(shapes, num_slots)
    return found


def _kind(shape: LayerShape, slab: Slab) -> tuple[bool, bool, bool, bool, bool]:
    """Whether a layer has rows; heads share them, there is a window, prompts stay or are staged."""
    windowed = shape.sliding_window is not None
    staged = slab.staging is not None and not windowed
    return shape.has_rows, slab.ragged, windowed, slab.room is not None, staged


def _made(
    has_rows: bool, ragged: bool, windowed: bool, keeps_prompt: bool, staged: bool, counts: Counts
) -> Layout:
    layout: RowLayout
    if not has_rows:
        without: Layout = feature(_LAYOUTS + "no_rows", "NoRows", "layers without rows")(counts)
        return without
    if ragged:
        make = feature(_LAYOUTS + "ragged", "Ragged", "heads that share rows")
        assert not windowed, "a plan refuses it"
        assert not keeps_prompt, "a plan refuses it"
        layout = make(counts)
    elif windowed:
        layout = feature(_LAYOUTS + "window", "Window", "sliding windows")(counts)
    else:
        layout = Even(counts)
    if staged:
        assert type(layout) is Even, "a plan refuses it"
        assert not keeps_prompt, "a plan refuses it"
        layout = feature(_LAYOUTS + "staged", "Staged", "plans with prefill_buffer")(layout)
    if keeps_prompt:
        layout = feature(_LAYOUTS + "prompt_kept", "PromptKept", "prompts that stay")(layout)
    return layout
