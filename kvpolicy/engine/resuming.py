"""Takes snapshots of sequences, and puts them into slots again."""

import json
from collections import abc
from functools import cached_property
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.cache.slot_contents import copy_slot, fill_slot
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.snapshots.memory_copies import MemoryCopies
from kvpolicy.engine.snapshots.snapshot import Costs, SequenceSnapshot
from kvpolicy.errors import ModelError, SnapshotError
from kvpolicy.hooks.stack import Stack
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import RegisterFile


class Resuming:
    """What an engine needs to take snapshots and to resume them.

    Attributes:
        memories: Copies what policies remember.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: ResolvedPlan,
        stacks: abc.Sequence[Stack],
        tokenizer: Any,
    ) -> None:
        self.memories = MemoryCopies(stacks, tokenizer)
        self._adapter, self._plan, self._stacks = adapter, plan, stacks
        self._last_identity: dict[str, Any] = {}

    @property
    def problem(self) -> str | None:
        """Why sequences of this engine cannot be taken out of their slots; ``None`` if they can."""
        if self._plan.padding == "stored":
            return 'the plan says padding = "stored", and pads belong to a group of prompts'
        return None

    def problem_with(self, snapshot: SequenceSnapshot) -> str | None:
        """Why a snapshot cannot be resumed here; ``None`` if it can."""
        if (problem := self.problem) is not None:
            return f"the snapshot cannot be resumed: {problem}"
        difference = _difference(snapshot.identity, self.identity)
        if difference is None:
            return None
        place, theirs, ours = difference
        return (
            f"the snapshot is of another plan or model: {place} is {theirs} there and {ours} here; "
            "resume it with the plan and the model that it was taken with"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The plan and the model as it is now, as plain data, equal where snapshots fit.

        It is the same object until the model changes. Weights that are offloaded are not compared.
        """
        try:
            weights = self._adapter.fingerprint()
        except ModelError:
            weights = None
        if not self._last_identity or self._last_identity["model"]["weights"] != weights:
            model = self._shapes["model"] | {"weights": weights}
            self._last_identity = self._shapes | {"model": model}
        return self._last_identity

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        """The plan and the shapes of the model."""
        shapes = self._adapter.layer_shapes()
        slabs = [
            layer.slab(stack, 1)
            for stack, layer in zip(self._stacks, self._plan.layers, strict=True)
        ]
        identity = {
            "plan": self._plan.identity(),
            "policies": self.memories.numbers,
            "names": self.memories.names,
            "model": {
                "layers": [
                    _layer_identity(attrs.asdict(shape), slab)
                    for shape, slab in zip(shapes, slabs, strict=True)
                ],
                "hidden_size": self._adapter.hidden_size,
                "vocab_size": self._adapter.vocab_size,
                # A process of several has the rows of its own heads.
                "process": getattr(self._adapter.processes, "rank", 0),
                "num_processes": self._adapter.processes.num_processes,
            },
        }
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    def take(
        self,
        seq: Sequence,
        cache: KVCache,
        states: Tensor | None,
        registers: RegisterFile,
        newest: abc.Sequence[int | None] | None = None,
        seen: int | None = None,
    ) -> SequenceSnapshot:
        """A snapshot of a sequence in its slot.

        Args:
            seq: The sequence.
            cache: The KV cache.
            states: Its states that wait for policies.
            registers: The registers of all slots.
            newest: How many of its newest rows to copy in each layer, see `copy_slot`.
            seen: Leave out the tokens from this one on, see there.

        Raises:
            SnapshotError: If sequences cannot be copied.
        """
        if (problem := self.problem) is not None:
            msg = f"no snapshot can be taken: {problem}"
            raise SnapshotError(msg)
        tensors = enumerate(map(registers.of_policy, self.memories.policies))
        return SequenceSnapshot(
            prompt=tuple(seq.prompt),
            tokens=tuple(seq.tokens),
            contents=copy_slot(cache, seq.slot, newest, seen),
            states=states,
            num_observed=seq.num_observed,
            registers={
                number: {name: float(tensor[seq.slot]) for name, tensor in named.items()}
                for number, named in tensors
                if named
            },
            memory=self.memories.pack(seq.memory),
            costs=Costs(*(getattr(seq, field.name) for field in attrs.fields(Costs))),
            identity=self.identity,
        )

    def put(
        self,
        snapshot: SequenceSnapshot,
        seq: Sequence,
        cache: KVCache,
        registers: RegisterFile,
    ) -> None:
        """Put a snapshot into the slot of a sequence, which is that of the snapshot then.

        Raises:
            SnapshotError: If the memory of a policy cannot be copied.
        """
        device = self._adapter.device
        moved = [(one, one.to(device, copy=True)) for one in snapshot.moved]
        self.memories.unpack(snapshot.memory, seq.memory, moved)
        fill_slot(cache, seq.slot, snapshot.contents)
        seq.num_observed = snapshot.num_observed
        for number, named in snapshot.registers.items():
            tensors = registers.of_policy(self.memories.policies[number])
            for name, value in named.items():
                tensors[name][seq.slot] = value


def _layer_identity(shape: dict[str, Any], slab: Slab) -> dict[str, Any]:
    """What snapshots have in common in one layer."""
    del shape["device"]
    shape["dtype"] = str(shape["dtype"]).removeprefix("torch.")
    states = [one | {"dtype": str(one["dtype"]).removeprefix("torch.")} for one in shape["states"]]
    del shape["states"]
    shape |= {"states": states} if states else {}
    # Only what is not the default, so that older snapshots stay valid.
    defaults = {"value_dim": shape["head_dim"], "num_readers": 1, "source": None, "reader": 0}
    for name, default in defaults.items():
        if shape[name] == default:
            del shape[name]
    bits = {"key_bits": slab.key_bits, "value_bits": slab.value_bits}
    integers = bits if any(bits.values()) else {}
    integers |= {"exact": slab.exact} if slab.exact else {}
    ragged = {"ragged": slab.ragged, **integers}
    return shape | {"tracks": slab.tracks, "num_queries": slab.window_size} | ragged


def _difference(theirs: Any, ours: Any, place: str = "") -> tuple[str, str, str] | None:
    """The first difference between plain data: where, and both values; ``None``: there is none."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys: abc.Iterable[Any] = dict.fromkeys([*theirs, *ours])
        pairs = [(key, theirs.get(key), ours.get(key)) for key in keys]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(index, *pair) for index, pair in enumerate(zip(theirs, ours, strict=True))]
    elif theirs == ours:
        return None
    else:
        return place, f"{theirs!r:.80}", f"{ours!r:.80}"
    found = (_difference(a, b, f"{place}.{key}".lstrip(".")) for key, a, b in pairs)
    return next((one for one in found if one is not None), None)
