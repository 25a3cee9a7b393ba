"""Forms in which a CPU holds the weights of a product: how they are stored, and how multiplied.

* ``packed``: as they are, in the order in which oneDNN reads them.
* ``bf16``: rounded to bfloat16, in that order. The input of a product is rounded likewise, and so
  is its result; sums are in fp32.
* ``int8``: integers of 8 bits, with a scale for each output. Few rows, as decode steps have, are
  multiplied in Numba, and are not rounded. For more, blocks of the integers, which bfloat16 holds
  exactly, are multiplied by oneDNN, which rounds the rows to bfloat16 where the processor
  multiplies that, and nothing elsewhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.devices import HAS_NUMBA
from kvpolicy.errors import error_summary
from kvpolicy.extras import install_extra
from kvpolicy.opaque import call_opaque

#: Form of the weights of linear layers: that of torch, or one of `FORMS`.
CpuWeights = Literal["plain", "packed", "bf16", "int8"]

# More rows are multiplied by oneDNN: they take longer to multiply than weights take to read.
FEW_ROWS = 8

# Outputs of which the weights become numbers at once: they stay in the second cache.
_BLOCK = 1024

_LEVELS = 127  # integers on either side of zero


class Weights(ABC):
    """The weights of a product.

    Attributes:
        num_bytes: Their bytes.
    """

    num_bytes: int

    @abstractmethod
    def __init__(self, weights: Tensor) -> None:
        """Take weights ``[N, K]``, which are left as they are."""

    @abstractmethod
    def multiply(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """The product with an input ``[..., K]``, and a bias ``[N]``: ``[..., N]``."""

    @abstractmethod
    def plain(self) -> Tensor:
        """The numbers that are multiplied, ``[N, K]``; a copy."""

    @classmethod
    @abstractmethod
    def problem(cls, dtype: torch.dtype) -> str | None:
        """Why weights of a precision cannot be held so here; ``None`` if they can."""


class Packed(Weights):
    """Weights in the order in which oneDNN reads them."""

    def __init__(self, weights: Tensor) -> None:
        self._weights: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights)
        self.num_bytes = torch.ops.mkldnn._nbytes(self._weights)

    def multiply(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weights.multiply`."""
        return _multiply(states, self._weights, bias)

    def plain(self) -> Tensor:
        """See `Weights.plain`."""
        return self._weights.to_dense()

    @classmethod
    def problem(cls, dtype: torch.dtype) -> str | None:
        """See `Weights.problem`."""
        try:
            weights = cls(torch.zeros(16, 16, dtype=dtype))
            weights.multiply(torch.zeros(1, 16, dtype=dtype), None)
        except (RuntimeError, AttributeError) as error:
            return (
                f"oneDNN does not multiply {_name(dtype)} here ({error_summary(error)}); load the "
                "model in float32, or leave it plain"
            )
        return None


class Bf16(Weights):
    """Weights that are rounded to bfloat16, packed."""

    def __init__(self, weights: Tensor) -> None:
        self._dtype = weights.dtype
        self._weights = Packed(weights.bfloat16())
        self.num_bytes = self._weights.num_bytes

    def multiply(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weights.multiply`."""
        found = self._weights.multiply(states.bfloat16(), None).to(states.dtype)
        return found if bias is None else found.add_(bias)

    def plain(self) -> Tensor:
        """See `Weights.plain`."""
        return self._weights.plain().to(self._dtype)

    @classmethod
    def problem(cls, dtype: torch.dtype) -> str | None:
        """See `Weights.problem`."""
        if dtype not in _ROUNDED_FROM:
            return _not_rounded(dtype)
        if not multiplies_bf16():
            return (
                "this processor has no instructions that multiply bfloat16, without which it is "
                "slower than float32; choose 'packed', or 'int8'"
            )
        return Packed.problem(torch.bfloat16)


class Int8(Weights):
    """Weights that are rounded to 8 bits: ``scale * integer``, with a scale for each output."""

    def __init__(self, weights: Tensor) -> None:
        self._dtype = weights.dtype
        wide = weights.float()
        scales = wide.abs().amax(dim=1) / _LEVELS
        # Of an output without weights; with infinities, no number is right.
        self._scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        self._integers = (wide / self._scales[:, None]).round().to(torch.int8)
        self._scales[~self._scales.isfinite()] = torch.nan
        self.num_bytes = self._integers.nbytes + self._scales.nbytes

    def multiply(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """See `Weights.multiply`."""
        rows = states.detach().reshape(-1, states.shape[-1])
        multiply = self._multiply_few if len(rows) <= FEW_ROWS else self._multiply_many
        found = multiply(rows).to(states.dtype).reshape(*states.shape[:-1], len(self._scales))
        return found if bias is None else found.add_(bias)

    def plain(self) -> Tensor:
        """See `Weights.plain`."""
        return (self._integers * self._scales[:, None]).to(self._dtype)

    @classmethod
    def problem(cls, dtype: torch.dtype) -> str | None:
        """See `Weights.problem`."""
        if dtype not in _ROUNDED_FROM:
            return _not_rounded(dtype)
        if not HAS_NUMBA:
            return f"integers are multiplied in Numba, which {install_extra('cpu')} brings"
        from kvpolicy.numba_common import can_run

        if not can_run():
            return "integers are multiplied in Numba, which runs here with other threads than torch"
        return Packed.problem(torch.float32)

    def _multiply_few(self, rows: Tensor) -> Tensor:
        from kvpolicy.numba_common import is_forked

        if is_forked():
            return self._multiply_many(rows)
        few = _FewRows(self._integers, self._scales)
        products: Tensor = call_opaque(few.multiply, rows.float().contiguous())
        return products

    def _multiply_many(self, rows: Tensor) -> Tensor:
        dtype = torch.bfloat16 if multiplies_bf16() else torch.float32
        rows = rows.to(dtype)
        blocks = [_multiply(rows, block.to(dtype), None) for block in self._integers.split(_BLOCK)]
        return torch.cat(blocks, dim=-1).float().mul_(self._scales)


class _FewRows:
    """The product of a few rows with weights in integers, in Numba."""

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        """Take integers ``[N, K]`` and scales ``[N]``."""
        self._integers, self._scales = integers, scales

    def multiply(self, rows: Tensor) -> Tensor:
        """Those of rows ``[T, K]`` in fp32, contiguous: ``[T, N]``."""
        call, products = self.fixed(rows)
        call()
        return products

    def fixed(self, rows: Tensor) -> tuple[Callable[[], None], Tensor]:
        """What multiplies rows that stay where they are, and the tensor it always writes to."""
        from kvpolicy.model.numba_products import multiply, num_columns
        from kvpolicy.numba_common import take_threads

        num_outputs = len(self._scales)
        products = torch.empty(len(rows), num_columns(num_outputs))
        arrays = [one.numpy() for one in (rows, self._integers, self._scales, products)]

        def call() -> None:
            take_threads()
            multiply(*arrays)

        return call, products[:, :num_outputs]


#: Forms by name; ``plain`` is none.
FORMS: dict[CpuWeights, type[Weights]] = {"packed": Packed, "bf16": Bf16, "int8": Int8}

_ROUNDED_FROM = (torch.float32, torch.bfloat16, torch.float16)


def multiplies_bf16() -> bool:
    """Whether the processor has instructions that multiply bfloat16, and oneDNN uses them."""
    return bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    )


def _multiply(states: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """The product of equal precisions in oneDNN, which reorders weights that are not packed."""
    # torch knows no gradient of this operator: detached, a backward fails and is not wrong.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(
        states.detach(), weights, bias, "none", [], ""
    )
    return found


def _not_rounded(dtype: torch.dtype) -> str:
    return f"{_name(dtype)} is not rounded; load the model in float32"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
