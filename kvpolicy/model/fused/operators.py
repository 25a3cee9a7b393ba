"""Operators that do in one kernel what a model does in several: norms, rotations, gates.

They round where the operators do that they replace, so that a step in half precision differs from
the model's own by the order of sums only. GPUs run them in Triton, and CPUs in Numba where it is
installed and they are in fp32; elsewhere they are these operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvpolicy.devices import HAS_NUMBA, HAS_TRITON

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define("norm(Tensor states, Tensor weight, float eps) -> Tensor")
_LIBRARY.define(
    "add_norm(Tensor states, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "rotate(Tensor query, Tensor key, Tensor cos, Tensor sin, "
    "Tensor? query_weight, Tensor? key_weight, float eps) -> (Tensor, Tensor)"
)
_LIBRARY.define("gate(Tensor gate, Tensor up) -> Tensor")

NORM = torch.ops.kvpolicy.norm.default
ADD_NORM = torch.ops.kvpolicy.add_norm.default
ROTATE = torch.ops.kvpolicy.rotate.default
GATE = torch.ops.kvpolicy.gate.default

# What kernels compute in: all numbers of a row are held at once.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_ROW = 2**14


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root mean square norm of states ``[..., M]``: that of Llama, in fp32 up to the weight."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(states.dtype)


def add_norm(states: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of states ``[..., M]``, and its norm."""
    total = states + added
    return total, norm(total, weight, eps)


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Rotate the halves of queries and keys, after their norms if they have weights.

    Args:
        query: ``[W, H_q, L, D]``.
        key: ``[W, H_kv, L, D]``.
        cos: ``[W, 1, L, D]``.
        sin: ``[W, 1, L, D]``.
        query_weight: ``[D]``; ``None``: no norm.
        key_weight: ``[D]``; ``None``: no norm.
        eps: Of the norms.
    """
    rotated = []
    for states, weight in ((query, query_weight), (key, key_weight)):
        normed = states if weight is None else norm(states, weight, eps)
        first, second = normed.chunk(2, dim=-1)
        rotated.append(normed * cos + torch.cat((-second, first), dim=-1) * sin)
    return rotated[0].contiguous(), rotated[1].contiguous()


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[..., N]``."""
    return silu(gate) * up


_PLAIN: dict[str, Callable[..., Any]] = {
    "norm": norm,
    "add_norm": add_norm,
    "rotate": rotate,
    "gate": gate,
}


def _on_cpu(name: str) -> Callable[..., Any]:
    plain = _PLAIN[name]

    def run(states: Tensor, *args: Any) -> Any:
        is_of_steps = name != "rotate" or states.shape[2] == 1
        if not HAS_NUMBA or states.dtype != torch.float32 or not is_of_steps:
            return plain(states, *args)
        from kvpolicy.model.fused import numba_kernels

        return getattr(numba_kernels, name)(states, *args)

    return run


for _name in _PLAIN:
    _LIBRARY.impl(_name, _on_cpu(_name), "CPU")
    torch.library.register_fake(f"kvpolicy::{_name}", _PLAIN[_name], lib=_LIBRARY)


def kernels_on(device: torch.device) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What the operators call on a device, by operator: without torch between, if that is Triton.

    Args:
        device: The device.
    """
    if device.type != "cuda" or not HAS_TRITON:
        return {}
    from kvpolicy.model.fused import triton_kernels

    operators = {"norm": NORM, "add_norm": ADD_NORM, "rotate": ROTATE, "gate": GATE}
    return {operator: getattr(triton_kernels, name) for name, operator in operators.items()}


def _in_triton(name: str) -> Any:
    def run(*args: Any) -> Any:
        from kvpolicy.model.fused import triton_kernels

        return getattr(triton_kernels, name)(*args)

    return run


if HAS_TRITON:
    for _name in _PLAIN:
        _LIBRARY.impl(_name, _in_triton(_name), "CUDA")
