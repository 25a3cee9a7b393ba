"""Types of rotary embeddings: which are supported, and those that depend on the length.

The frequencies of most types are fixed. Those of two depend on the number of tokens:

* ``dynamic`` (NTK): beyond the original length they change with every token. Keys keep the
  frequencies they were stored with, as in `generate`.
* ``longrope``: beyond the original length there is another set, for all tokens. A sequence cannot
  cross it: keys stored with the first set are of no use with the second.

transformers takes the length of the longest sequence of a batch, and remembers it for the next.
Here each sequence has the frequencies that it has alone, in a model that has served no other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.errors import ModelError
from kvpolicy.model.decoder import decoder_of
from kvpolicy.model.forward_input import forward_under_way

_FIXED = {"default", "linear", "llama3", "ntk_alpha", "proportional", "yarn"}
_BY_LENGTH = {"dynamic", "longrope"}


def rope_types(rotary: nn.Module) -> set[str]:
    """Types of a rotary embedding; none if the module is something else."""
    types = getattr(rotary, "rope_type", ())
    if isinstance(types, dict):  # by type of layer
        return set(types.values())
    return {types} if isinstance(types, str) else set()


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the frequencies of a rotary embedding depend on the number of tokens."""
    return bool(rope_types(rotary) & _BY_LENGTH)


def check_rope(model: PreTrainedModel) -> None:
    """Check that the rotary embeddings of a model are known.

    Raises:
        ModelError: If one is not: its frequencies might depend on other sequences.
    """
    types = {one for module in decoder_of(model).modules() for one in rope_types(module)}
    unknown = types - _FIXED - _BY_LENGTH
    if unknown:
        msg = (
            f"model {type(model).__name__} cannot be run: its rotary embedding has the type "
            f"{min(unknown)!r}; known are {', '.join(sorted(_FIXED | _BY_LENGTH))}"
        )
        raise ModelError(msg)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings that a configuration describes."""
    found = getattr(config, "rope_parameters", None) or {}
    by_layer = [one for one in found.values() if isinstance(one, dict)]
    return by_layer or [found]


def max_positions(config: Any) -> int:
    """Tokens a sequence may have, prompt and generation together.

    Some configurations state the length before scaling, others the length after it.
    """
    stated: int = config.max_position_embeddings
    ropes = rope_parameters(config)
    # For this type it is always the length before scaling, whatever other layers have.
    ropes = [rope for rope in ropes if rope.get("rope_type") == "dynamic"] or ropes
    return min(
        max(stated, int(_original(rope, stated) * (rope.get("factor") or 1))) for rope in ropes
    )


def longrope_length(config: Any) -> int | None:
    """Tokens that no sequence can cross; ``None`` if there is no such number."""
    stated: int = config.max_position_embeddings
    ropes = rope_parameters(config)
    lengths = [_original(rope, stated) for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def _original(rope: dict[str, Any], stated: int) -> int:
    return rope.get("original_max_position_embeddings") or stated


def by_sequence(rotary: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward for a rotary embedding that treats every sequence as if it were alone."""
    return partial(_rotate_by_sequence, rotary)


def _rotate_by_sequence(
    rotary: nn.Module, states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[B, L, R]`` each."""
    step = forward_under_way().step  # models pass their rotary embedding no other arguments
    assert isinstance(step, EagerStep), "steps of models that rotate by length are eager"
    parts = [
        _rotate_alone(rotary, length, states, position_ids[row : row + 1], *args, **kwargs)
        for row, length in enumerate(step.totals.tolist())
    ]
    cos, sin = zip(*parts, strict=True)
    return torch.cat(cos), torch.cat(sin)


def _rotate_alone(
    rotary: nn.Module, length: int, states: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of one sequence, ``[1, L, R]`` each."""
    fresh = _as_new(rotary)
    last = torch.full_like(position_ids[:, :1], length - 1)
    positions = torch.cat([position_ids, last], dim=1)
    cos, sin = type(rotary).forward(fresh, states, positions, *args, **kwargs)
    return cos[:, :-1], sin[:, :-1]


def _as_new(rotary: nn.Module) -> Any:
    """A copy of a rotary embedding as it was before it served any sequence."""
    fresh: Any = object.__new__(type(rotary))
    buffers = dict(rotary.named_buffers())
    vars(fresh).update(vars(rotary))
    # It stores the frequencies that it has computed last in place of the original ones.
    fresh._buffers = {name: buffer.clone() for name, buffer in buffers.items()}
    for name, value in (vars(rotary) | buffers).items():
        if name.endswith("original_inv_freq"):
            fresh._buffers[name.replace("original_", "")] = value.clone()
        if name.endswith("max_seq_len_cached"):
            vars(fresh)[name] = fresh.original_max_seq_len
    return fresh
