"""`SequenceSnapshot`: a sequence out of its slot, as a value that can be kept, copied and saved.

A file has a checksum, and reading one runs no code.
"""

from collections import abc
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.integers import bytes_of_row
from kvpolicy.cache.slot_contents import LayerContents, SlotContents
from kvpolicy.engine.snapshots.checked_file import CheckedFormat, UnreadableError
from kvpolicy.engine.snapshots.plain_data import NotPlainError, decode, encode
from kvpolicy.errors import SnapshotError, error_summary
from kvpolicy.files import atomic_write, path_of

FORMAT = CheckedFormat("kvpolicy.snapshot", version=2, holds="a snapshot of a sequence")


@attrs.frozen
class Costs:
    """What a sequence has cost until it was taken; the fields are those of `Result`."""

    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    full_bytes: int = 0


@attrs.frozen(eq=False, repr=False)
class SequenceSnapshot:
    """A sequence as it was at one moment: tokens, rows, and what policies keep of it.

    It holds copies of the rows that the sequence held, and no slab. It can be resumed any number of
    times, by ``Request(resume=...)`` or `PolicyCache.restore`, in every engine with an equal plan
    and a model of equal shapes; it knows nothing of the model's weights.

    Attributes:
        prompt: Tokens before the newest answer, earlier turns included.
        tokens: Tokens of the newest answer. The last one may have no rows yet.
        contents: Its rows, tracks and queries in every layer.
        states: Last hidden states that no policy has observed, ``[N, M]``; ``None`` if none are
            wanted.
        num_observed: Tokens that policies have observed.
        registers: The registers of each policy, by the number of the policy and their name.
        memory: What each policy remembers, by the number of the policy.
        costs: What it has cost so far.
        identity: The plan and the shapes of the model, as plain data.
        moved: Tensors of ``memory`` that belong on the device of the engine.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    contents: SlotContents
    states: Tensor | None
    num_observed: int
    registers: abc.Mapping[int, abc.Mapping[str, float]]
    memory: abc.Mapping[int, Any]
    costs: Costs
    identity: abc.Mapping[str, Any]
    moved: tuple[Tensor, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of its tokens."""
        return (*self.prompt, *self.tokens)

    @property
    def seq_len(self) -> int:
        """Tokens that the model has seen: all of them, or all but the newest."""
        return self.contents.seq_len

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; those in objects of policies are not counted."""
        own = [*self.contents.tensors, *([] if self.states is None else [self.states])]
        return sum(tensor.nbytes for tensor in chain(own, _tensors_in(list(self.memory.values()))))

    def __repr__(self) -> str:
        num_tokens, rows = len(self.token_ids), [one.num_rows for one in self.contents.layers]
        most = max(rows, default=0)
        return f"SequenceSnapshot(tokens={num_tokens}, rows={most}, num_bytes={self.num_bytes})"

    def to(self, device: str | torch.device) -> "SequenceSnapshot":
        """The same with its rows on a device, such as ``"cpu"`` to keep it beside a GPU.

        What policies remember stays where it is.
        """
        target = torch.device(device)
        layers = tuple(layer.to(target) for layer in self.contents.layers)
        return attrs.evolve(
            self,
            contents=attrs.evolve(self.contents, layers=layers),
            states=None if self.states is None else self.states.to(target),
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file of safetensors with a checksum, which only this user can read.

        Args:
            path: The file; its name should end in ``.safetensors``.

        Raises:
            SnapshotError: If a policy remembers something that is no plain data.
            OutputError: If the file cannot be written.
        """
        target = path_of(path, "a snapshot", error=SnapshotError)
        atomic_write(target, FORMAT.to_bytes(*self.packed()), private=True)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors by name, on the CPU, and all the rest as JSON writes it.

        Raises:
            SnapshotError: If a policy remembers something that is no plain data.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.contents.layers):
            tensors |= {f"layer.{index}.{name}": one for name, one in _named(layer).items()}
        if self.states is not None:
            tensors["states"] = self.states
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        header = {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "num_observed": self.num_observed,
            "compacted_at": [layer.compacted_at for layer in self.contents.layers],
            "prompt_len": self.contents.prompt_len,
            "rope_offset": self.contents.rope_offset,
            "prompt_rows": [layer.prompt_rows for layer in self.contents.layers],
            "rows": [layer.rows for layer in self.contents.layers],
            "registers": [[number, own] for number, own in self.registers.items()],
            "memory": [
                [number, self._encoded(number, notes, tensors)]
                for number, notes in self.memory.items()
            ],
            "costs": attrs.asdict(self.costs),
            "identity": self.identity,
        }
        return tensors, header

    def _encoded(self, number: int, notes: object, tensors: dict[str, Tensor]) -> Any:
        try:
            return encode(notes, tensors, "memory.")
        except NotPlainError as error:
            name = self.identity["names"][number]
            msg = (
                f"the snapshot cannot be written: the memory of policy '{name}' holds {error}; "
                "policies should store tensors and plain data, or have the methods pack_memory and "
                "unpack_memory, see docs/reference/hooks.md"
            )
            raise SnapshotError(msg) from error

    @classmethod
    def load(cls, path: str | Path) -> "SequenceSnapshot":
        """Read a file that `save` has written; tensors are on the CPU.

        Args:
            path: The file.

        Raises:
            SnapshotError: If it cannot be read, is no snapshot, differs in a bit from what was
                written, or was written by another version.
        """
        source = path_of(path, "a snapshot", error=SnapshotError)
        try:
            tensors, header = FORMAT.read(source)
        except UnreadableError as error:
            raise _refused(source, str(error)) from error
        try:
            snapshot = cls.unpacked(header, tensors)
            problem = snapshot.problem
        except Exception as error:
            raise _refused(source, f"is damaged: {error_summary(error)}") from error
        if problem is not None:
            raise _refused(source, f"is damaged: {problem}")
        return snapshot

    @property
    def problem(self) -> str | None:
        """What is wrong with its numbers and shapes, if it comes from elsewhere; or ``None``."""
        return _problem(self)

    @classmethod
    def unpacked(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> "SequenceSnapshot":
        """The snapshot that `packed` has given, not checked; other data raise anything."""
        moved: list[Tensor] = []
        identity = header["identity"]
        layers = tuple(
            _layer(f"layer.{index}.", shape, counts, tensors)
            for index, (shape, *counts) in enumerate(
                zip(
                    identity["model"]["layers"],
                    header["compacted_at"],
                    header["prompt_rows"],
                    header["rows"],
                    strict=True,
                )
            )
        )
        return cls(
            prompt=tuple(header["prompt"]),
            tokens=tuple(header["tokens"]),
            contents=SlotContents(
                layers,
                header["seq_len"],
                header["prompt_len"],
                header.get("rope_offset", 0),  # older snapshots have none
            ),
            states=tensors.get("states"),
            num_observed=header["num_observed"],
            registers=dict(header["registers"]),
            memory={number: decode(own, tensors, moved) for number, own in header["memory"]},
            costs=Costs(**header["costs"]),
            identity=identity,
            moved=tuple(moved),
        )


def _named(layer: LayerContents) -> dict[str, Tensor]:
    """The tensors of a layer by their names in a file."""
    named = {"keys": layer.keys, "values": layer.values, "positions": layer.positions}
    named |= {f"track.{name}": track for name, track in layer.tracks.items()}
    named |= {f"state.{name}": state for name, state in layer.states.items()}
    named |= {f"exact.{name}": rows for name, rows in layer.exact.items()}
    return named if layer.window is None else named | {"queries": layer.window}


def _layer(
    prefix: str, shape: dict[str, Any], counts: list[int], tensors: dict[str, Tensor]
) -> LayerContents:
    return LayerContents(
        tensors[prefix + "keys"],
        tensors[prefix + "values"],
        tensors[prefix + "positions"],
        {name: tensors[f"{prefix}track.{name}"] for name in shape["tracks"]},
        tensors[prefix + "queries"] if shape["num_queries"] else None,
        compacted_at=counts[0],
        prompt_rows=counts[1],
        rows=counts[2],
        states={
            one["name"]: tensors[f"{prefix}state.{one['name']}"] for one in shape.get("states", ())
        },
        exact={name: tensors[f"{prefix}exact.{name}"] for name in _exact_sides(shape)},
    )


def _problem(snapshot: SequenceSnapshot) -> str | None:
    """What is wrong with the numbers and shapes of a snapshot, or ``None``."""
    model, seq_len = snapshot.identity["model"], snapshot.seq_len
    tokens = snapshot.token_ids
    if not all(type(token) is int and 0 <= token < model["vocab_size"] for token in tokens):
        return "a token is outside of the vocabulary"
    # Within a prompt any number of tokens may follow; else the newest one.
    most = len(tokens) if not snapshot.tokens else seq_len + 1
    if not (0 < seq_len <= len(tokens) <= most):
        return f"it has {len(tokens)} tokens, of which the model has seen {seq_len}"
    counts = [snapshot.num_observed, *(layer.compacted_at for layer in snapshot.contents.layers)]
    counts += [snapshot.contents.prompt_len]
    counts += [layer.prompt_rows for layer in snapshot.contents.layers]
    if not all(type(count) is int and 0 <= count <= seq_len for count in counts):
        return f"it counts more tokens than the {seq_len} that the model has seen"
    for index, (layer, shape) in enumerate(
        zip(snapshot.contents.layers, model["layers"], strict=True)
    ):
        dtype = getattr(torch, shape["dtype"])
        heads, num_rows, size = shape["num_kv_heads"], layer.num_rows, shape["head_dim"]
        if layer.prompt_rows > num_rows:
            return f"layer {index} has {num_rows} rows, {layer.prompt_rows} of them of a prompt"
        expected: dict[str, tuple[list[int], torch.dtype]] = {
            "keys": _expected_rows(shape, num_rows, size, shape.get("key_bits", 0)),
            "values": _expected_rows(
                shape, num_rows, shape.get("value_dim", size), shape.get("value_bits", 0)
            ),
            "positions": ([heads, num_rows], torch.int64),
            **{f"track.{name}": ([heads, num_rows], torch.float32) for name in shape["tracks"]},
            **{
                f"state.{one['name']}": (list(one["size"]), getattr(torch, one["dtype"]))
                for one in shape.get("states", ())
            },
            **{
                f"exact.{name}": ([heads, min(shape["exact"], seq_len), dim], dtype)
                for name, dim in _exact_sides(shape).items()
            },
            "queries": (
                [shape["num_heads"], min(shape["num_queries"], seq_len), size],
                dtype,
            ),
        }
        for name, tensor in _named(layer).items():
            if (list(tensor.shape), tensor.dtype) != expected[name]:
                return f"{name} of layer {index} have shape {list(tensor.shape)}, {tensor.dtype}"
        rising = torch.cat(
            [
                layer.positions.new_full((heads, 1), -1),
                layer.positions,
                layer.positions.new_full((heads, 1), seq_len),
            ],
            dim=1,
        )
        rises = rising.diff(dim=1) > 0
        if shape["ragged"]:  # columns that a head has no row for come first
            rises |= rising[:, 1:] == -1
        if not rises.all():
            return f"positions of layer {index} do not rise from 0 to {seq_len - 1}"
        counts_of_heads = (layer.positions >= 0).sum(dim=1)
        least, most = layer.rows * heads - heads * num_rows, layer.rows * heads
        fits = least <= int(counts_of_heads.sum()) <= most
        if not fits or (not shape["ragged"] and layer.rows != num_rows):
            return f"layer {index} counts {layer.rows} rows, and its heads hold another number"
    if snapshot.states is not None:
        size = [seq_len - snapshot.num_observed, model["hidden_size"]]
        if list(snapshot.states.shape) != size:
            return f"states have shape {list(snapshot.states.shape)}; expected {size}"
    return None


def _exact_sides(shape: dict[str, Any]) -> dict[str, int]:
    """Size of a head of keys or values whose newest rows are exact, by name."""
    sizes = {"keys": shape["head_dim"], "values": shape.get("value_dim", shape["head_dim"])}
    bits = {"keys": shape.get("key_bits"), "values": shape.get("value_bits")}
    return {name: dim for name, dim in sizes.items() if shape.get("exact") and bits[name] == 4}


def _expected_rows(
    shape: dict[str, Any], num_rows: int, dim: int, bits: int
) -> tuple[list[int], torch.dtype]:
    """Shape and dtype of the keys or values of a layer, as they are stored."""
    size = [shape["num_kv_heads"], num_rows]
    if bits:
        return [*size, bytes_of_row(dim, bits)], torch.uint8
    return [*size, dim], getattr(torch, shape["dtype"])


def _refused(path: Path, problem: str) -> SnapshotError:
    return SnapshotError(
        f"snapshot '{path}' {problem}; take it again, and write it with SequenceSnapshot.save"
    )


def _tensors_in(value: object) -> abc.Iterator[Tensor]:
    """The tensors in plain data."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _tensors_in(one)
