"""The inputs of `generate`: from the columns of a padded batch to the new tokens of each row.

`generate` counts columns, pads included; the engine counts tokens. A column that is 0 in the
attention mask is a pad in that row: it is never stored and has no position.
"""

import numpy as np
import torch
from torch import Tensor

from kvpolicy.errors import CacheError, shown

_CONTINUE = (
    "a cache continues one conversation: give all of its tokens again, with the same pads, and "
    "new ones after them, or call reset() first"
)


class Columns:
    """The columns seen so far.

    Attributes:
        count: Number of columns, pads included.
        num_tokens: Columns of each row that hold a token, ``[B]``; ``[1]`` before the first.
        new_is_real: Which of the columns that were read last are no pads, bool ``[B, L]``.
    """

    def __init__(self) -> None:
        self.count = 0
        self.num_tokens: np.ndarray = np.zeros(1, dtype=np.int64)
        self.new_is_real: np.ndarray = np.zeros((1, 0), dtype=bool)
        self._is_real: np.ndarray | None = None  # [B, columns of the turns so far]

    def read(
        self, token_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> list[list[int]]:
        """The new tokens of each row.

        Args:
            token_ids: The new columns, ``[B, L]``.
            attention_mask: 0 for pads, over all columns, ``[B, count + L]``; ``None`` if there
                are none.
            position_ids: Positions of the tokens of the new columns, ``[B, L]`` or ``[1, L]``,
                if known: compared with the positions they will get.

        Raises:
            CacheError: If they do not continue the columns before them.
        """
        check_tensor("input_ids", token_ids)
        for name, value in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            if value is not None:
                check_tensor(name, value, dims=None)
        num_rows, width = token_ids.shape
        if not width:
            msg = f"a PolicyCache was given no token after those it has seen; {_CONTINUE}"
            raise CacheError(msg)
        mask = _mask(attention_mask, num_rows, self.count + width)
        self._check_old(mask[:, : self.count], num_rows, width)
        is_real = mask[:, self.count :]
        _check_new(is_real)
        self._check_positions(is_real, position_ids)
        self.new_is_real = is_real
        rows = token_ids.cpu().numpy()
        return [row[real].tolist() for row, real in zip(rows, is_real, strict=True)]

    def add(self, new: list[list[int]], width: int, attention_mask: Tensor | None) -> None:
        """Count columns after their tokens, as returned by `read`, have been stored."""
        self.num_tokens = self.num_tokens + [len(tokens) for tokens in new]
        self.count += width
        if self._is_real is None or width > 1:
            self._is_real = _mask(attention_mask, len(new), self.count)

    @classmethod
    def holding(cls, num_tokens: list[int]) -> "Columns":
        """The columns of rows with so many tokens, padded on the left."""
        columns = cls()
        columns.num_tokens = np.array(num_tokens, dtype=np.int64)
        columns.count = max(num_tokens)
        columns._is_real = np.arange(columns.count) >= columns.count - columns.num_tokens[:, None]
        return columns

    def take(self, rows: list[int]) -> None:
        """Continue with copies of some rows, in another order; a row may be taken twice."""
        self.num_tokens = self.num_tokens[rows]
        if self._is_real is not None:
            self._is_real = self._is_real[rows]

    def _check_old(self, mask: np.ndarray, num_rows: int, width: int) -> None:
        """Check that earlier columns are unchanged; not checked for a single new column."""
        if self._is_real is None:
            return
        if num_rows != len(self._is_real):
            msg = (
                f"a PolicyCache of {len(self._is_real)} rows was given a batch of {num_rows}; "
                f"{_CONTINUE}"
            )
            raise CacheError(msg)
        # Single columns, as `generate` adds them, are never pads.
        old = np.ones_like(mask)
        old[:, : self._is_real.shape[1]] = self._is_real
        if width > 1 and (old != mask).any():
            row, column = np.argwhere(old != mask)[0]
            before, now = ("a token", "a pad") if old[row, column] else ("a pad", "a token")
            msg = (
                f"a PolicyCache was given an attention mask in which column {column} of row {row} "
                f"is {now}; it was {before} before; {_CONTINUE}"
            )
            raise CacheError(msg)

    def _check_positions(self, is_real: np.ndarray, position_ids: Tensor | None) -> None:
        if position_ids is None or position_ids.dim() != 2:
            return
        given = np.broadcast_to(position_ids.cpu().numpy(), is_real.shape)
        expected = self.num_tokens[:, None] + is_real.cumsum(axis=1) - 1
        wrong = np.argwhere(is_real & (given != expected))
        if len(wrong):
            row, column = wrong[0]
            msg = (
                f"a PolicyCache was given a token for position {given[row, column]} of row {row}, "
                f"where position {expected[row, column]} comes next; {_CONTINUE}"
            )
            raise CacheError(msg)


def check_tensor(name: str, value: object, dims: int | None = 2) -> None:
    """Check that an argument is a tensor with values, of so many dimensions.

    Raises:
        CacheError: If it is not.
    """
    is_tensor = isinstance(value, Tensor) and not value.is_meta
    if not is_tensor or (dims is not None and value.dim() != dims):  # type: ignore[attr-defined]
        msg = (
            f"a PolicyCache was given {name}={shown(value)}; expected a tensor [B, L], one row for "
            "each prompt"
        )
        raise CacheError(msg)


def _mask(attention_mask: Tensor | None, num_rows: int, width: int) -> np.ndarray:
    """Which columns hold a token, bool ``[B, width]``."""
    if attention_mask is None:
        return np.ones((num_rows, width), dtype=bool)
    if attention_mask.shape != (num_rows, width):
        msg = (
            f"a PolicyCache was given an attention mask of shape {list(attention_mask.shape)}; "
            f"expected {[num_rows, width]}, one entry for each column so far; "
            f"{_CONTINUE}"
        )
        raise CacheError(msg)
    return attention_mask.to(device="cpu", dtype=torch.bool).numpy()


def _check_new(is_real: np.ndarray) -> None:
    empty = np.flatnonzero(~is_real.any(axis=1))
    if len(empty):
        msg = (
            f"a PolicyCache was given no token for row {empty[0]}; every forward needs one for "
            "each row; leave out prefill_chunk_size: long prompts are taken in chunks anyway"
        )
        raise CacheError(msg)
    padded = np.flatnonzero(~is_real[:, -1])
    if len(padded):
        msg = (
            f"a PolicyCache was given row {padded[0]} padded on the right; the last column must be "
            'its newest token; use a tokenizer with padding_side="left"'
        )
        raise CacheError(msg)
