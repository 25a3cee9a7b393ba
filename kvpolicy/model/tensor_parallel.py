"""Tensor parallelism: models that several processes hold together, split by transformers.

Each process computes some heads of every layer and stores their rows. Policies do not notice:
the tensors that hooks read are gathered from all processes, and each process applies its own part
of an answer. All processes ask the same policies the same questions, so their answers are equal.

What depends on the release of transformers: the plan is an argument of ``from_pretrained``, later
a part of its ``DistributedConfig``; the mesh of processes has one axis, later several.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.errors import ModelError
from kvpolicy.extras import install_extra

# ``"auto"``, the model's own; or a style for each of some modules, as transformers takes it.
TpPlan = str | Mapping[str, str]

# Modules that compute keys, alone or with queries and values, in the models of transformers.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


class SingleProcess:
    """A model in one process: what the engine needs to know, and what several do otherwise.

    Attributes:
        num_processes: Processes that hold the model.
        num_shards: Processes that share the heads of a layer; 1 if each has all heads.
    """

    num_processes = 1
    num_shards = 1

    def layer_rows(self, cache: KVCache, layers: Sequence[int], slots: Sequence[int]) -> LayerRows:
        """The rows of some slots, each in a layer, in all heads of the model."""
        return LayerRows(cache, layers, slots)

    def all_gather(self, part: Tensor) -> Tensor:
        """All heads of a tensor, of which ``part`` has those of this process."""
        return part

    def own_part(self, whole: Tensor) -> Tensor:
        """The heads of this process in the result of `all_gather`."""
        return whole

    def same_tokens(self, tokens: Tensor) -> Tensor:
        """Drawn tokens, the same in all processes."""
        return tokens


@attrs.frozen(eq=False)
class TensorParallelGroup(SingleProcess):
    """A model split over several processes; this is one of them.

    Every method is a collective: all processes call it, in the same order, with tensors of the
    same shape.

    Attributes:
        rank: Number of this process, from 0.
        num_processes: Processes that hold the model.
        num_shards: Processes that share the heads of a layer; 1 if each has all heads.
        group: The process group.
    """

    rank: int
    num_processes: int
    num_shards: int
    group: "dist.ProcessGroup | None" = None

    def layer_rows(self, cache: KVCache, layers: Sequence[int], slots: Sequence[int]) -> LayerRows:
        """The rows of some slots, each in a layer, in all heads of the model."""
        if self.num_shards == 1:
            return LayerRows(cache, layers, slots)
        return GatheredRows(self, cache, layers, slots)

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts ``[B, H, ...]`` of all processes, ``[B, num_shards * H, ...]``."""
        if self.num_shards == 1:
            return part
        whole = part.new_empty(self.num_shards, *part.shape)
        dist.all_gather(list(whole), part.contiguous(), self.group)
        return whole.movedim(0, 1).flatten(1, 2)  # a view if there is one sequence

    def own_part(self, whole: Tensor) -> Tensor:
        """The heads of this process in the result of `all_gather`, a view."""
        num_heads = whole.shape[1] // self.num_shards
        return whole.narrow(1, self.rank * num_heads, num_heads)

    def same_tokens(self, tokens: Tensor) -> Tensor:
        """The tokens ``[B]`` that the first process has drawn.

        Logits are equal in all processes, and so should be the tokens drawn from them. If they
        ever differed, in a last bit, the processes would wait for each other forever.
        """
        shared = tokens.clone()
        dist.broadcast(shared, group=self.group, group_src=0)
        return shared


class GatheredRows(LayerRows):
    """Rows whose heads are spread over several processes; each tensor is gathered once if read."""

    def __init__(
        self,
        group: TensorParallelGroup,
        cache: KVCache,
        layers: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        super().__init__(cache, layers, slots)
        self._group = group
        self._own = LayerRows(cache, layers, slots)
        self._gathered: dict[str, Tensor] = {}

    @property
    def keys(self) -> Tensor:
        """Keys after RoPE, ``[B, H_kv, T, D]``."""
        return self._gather("keys", lambda: self._own.keys)

    @property
    def values(self) -> Tensor:
        """Values, ``[B, H_kv, T, D]``."""
        return self._gather("values", lambda: self._own.values)

    @property
    def positions(self) -> Tensor:
        """Position of each row's token in its sequence, ``[B, H_kv, T]``, int64."""
        return self._gather("positions", lambda: self._own.positions)

    @property
    def queries(self) -> Tensor:
        """The last queries after RoPE, oldest first, ``[B, H_q, W, D]``."""
        return self._gather("queries", lambda: self._own.queries)

    @property
    def attn_weights(self) -> Tensor:
        """Softmax weights of these queries over the rows they see, ``[B, H_q, W, T]``, fp32."""
        return self._gather("attn_weights", lambda: self._own.attn_weights)

    def track(self, name: str) -> Tensor:
        """One track of these rows, ``[B, H_kv, T]``, fp32."""
        return self._gather(f"track {name}", lambda: self._own.track(name))

    def set_track(self, name: str, values: Tensor) -> None:
        """Assign new numbers to one track of these rows, ``[B, H_kv, T]``."""
        super().set_track(name, self._group.own_part(values))
        self._gathered.pop(f"track {name}", None)

    def keep(
        self, keep: Tensor, *, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        """Evict all rows but the chosen ones from these slots, in place."""
        own = self._group.own_part
        super().keep(
            own(keep),
            keys=None if keys is None else own(keys),
            values=None if values is None else own(values),
        )
        self._gathered.clear()
        self.kept = keep

    def _gather(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        if name not in self._gathered:
            self._gathered[name] = self._group.all_gather(read())
            self._note_copy(0)
        return self._gathered[name]

    def _note_copy(self, num_bytes: int) -> None:
        gathered = sum(tensor.nbytes for tensor in self._gathered.values())
        super()._note_copy(num_bytes + gathered)


def processes_of(model: PreTrainedModel, config: Any) -> SingleProcess:
    """The processes that hold a model.

    Args:
        model: The model.
        config: The configuration of its decoder.

    Raises:
        ModelError: The model is also split in another way, or its heads cannot be shared evenly.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return SingleProcess()
    mesh: Any = model._device_mesh
    problem = None
    if mesh.size() != size:
        problem = (
            f"{mesh.size()} processes hold it, and only {size} of them split its heads; give the "
            "others no part of it"
        )
    num_shards = size if _splits_heads(model.tp_plan) else 1
    problem = problem or _heads_problem(config, num_shards)
    if problem is not None:
        msg = f"model {type(model).__name__} cannot be run: {problem}"
        raise ModelError(msg)
    group = mesh.get_group("tp" if mesh.ndim > 1 else None)
    return TensorParallelGroup(dist.get_rank(group), size, num_shards, group)


def loading_options(name: object, config: Any, tp_plan: TpPlan) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` with which each process loads its own part only.

    Args:
        name: The model, for messages.
        config: Its configuration.
        tp_plan: How to split it.

    Raises:
        ModelError: It cannot be split, or this process was not started as one of several.
    """
    problem = _launch_problem() or _plan_problem(config.get_text_config(decoder=True), tp_plan)
    if problem is not None:
        msg = f"model '{name}' cannot be split over processes: {problem}"
        raise ModelError(msg)
    plan = tp_plan if isinstance(tp_plan, str) else dict(tp_plan)
    if "tp_plan" in {field.name for field in fields(DistributedConfig)}:
        return {"distributed_config": DistributedConfig(tp_plan=plan)}  # type: ignore[arg-type]
    return {"tp_plan": plan}


def refuse_several_processes() -> None:
    """Refuse to load a whole model in each of several processes that torchrun has started.

    Raises:
        ModelError: torchrun has started this process and others.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        msg = (
            "torchrun has started several processes, each of which would do all the work; only "
            "'kvpolicy run --tensor-parallel' splits a model over them, start one for the rest"
        )
        raise ModelError(msg)


def _launch_problem() -> str | None:
    if not dist.is_initialized() and "RANK" not in os.environ:
        return (
            "this is a single process; start several with "
            "torchrun --nproc-per-node N -m kvpolicy run --tensor-parallel"
        )
    if find_spec("accelerate") is None:
        return (
            f"transformers needs the package accelerate for it; {install_extra('tensor-parallel')}"
        )
    return None


def _plan_problem(config: Any, tp_plan: TpPlan) -> str | None:
    own = getattr(config, "base_model_tp_plan", None) or {}
    changes = {} if isinstance(tp_plan, str) else tp_plan
    plan = own | dict(changes)
    if isinstance(tp_plan, str) and tp_plan != "auto":
        return f"its plan was given as {tp_plan!r}; give 'auto' or a style for each module"
    if not plan:
        return "transformers has no plan for this kind of model; load it in one process"
    return _heads_problem(config, _num_processes()) if _splits_heads(plan) else None


def _num_processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether each process computes its own keys; some plans gather them, for a norm or a split."""
    styles = (style for name, style in plan.items() if name.split(".")[-1] in _KEY_PROJECTIONS)
    return "colwise" in styles


def _heads_problem(config: Any, num_processes: int) -> str | None:
    heads = config.num_attention_heads
    for number, kind in (
        (getattr(config, "num_key_value_heads", None) or heads, "KV heads"),
        (heads, "query heads"),
    ):
        if number % num_processes:
            return (
                f"its {number} {kind} cannot be shared evenly by {num_processes} processes; "
                f"start a number of them that divides {number}"
            )
    return None
