"""Models that several processes hold together, as transformers splits them by its ``tp_plan``.

What depends on the release: the plan is an argument of ``from_pretrained``, later a part of
its ``DistributedConfig``; the mesh of processes has one axis, later one for each way of splitting
a model.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from kvpolicy.errors import ModelError
from kvpolicy.model.peers import SINGLE, TensorParallelGroup

# ``"auto"``, the model's own; or a style for each of some modules, as transformers takes it.
TpPlan = str | Mapping[str, str]

# What makes keys, by itself or with queries and values, in the models of transformers.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def loading_options(name: object, config: Any, tp_plan: TpPlan) -> dict[str, Any]:
    """What ``from_pretrained`` is to be given, so that each process loads its own part only.

    Args:
        name: The model, for messages.
        config: Its configuration.
        tp_plan: How it is to be split.

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


def peers_of(model: PreTrainedModel) -> TensorParallelGroup:
    """The processes that hold a model together.

    Raises:
        ModelError: It is split in another way, too.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return SINGLE
    mesh: Any = model._device_mesh
    if mesh.size() != size:
        msg = (
            f"model {type(model).__name__} cannot be run: {mesh.size()} processes hold it, and "
            f"only {size} of them split its heads; give the others no part of it"
        )
        raise ModelError(msg)
    group = mesh.get_group("tp" if mesh.ndim > 1 else None)
    return TensorParallelGroup(dist.get_rank(group), size, group, model.device)


def holders_of_heads(
    model: PreTrainedModel, config: Any, peers: TensorParallelGroup
) -> TensorParallelGroup:
    """Those of a model's processes that share its heads; each alone, where all have all heads.

    Raises:
        ModelError: The heads cannot be shared evenly.
    """
    if peers.size == 1 or not _splits_heads(model.tp_plan):
        return SINGLE
    problem = _heads_problem(config, peers.size)
    if problem is not None:
        msg = f"model {type(model).__name__} cannot be run: {problem}"
        raise ModelError(msg)
    return peers


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
            "transformers needs the package accelerate for it; "
            "pip install 'kvpolicy[tensor-parallel]'"
        )
    return None


def _plan_problem(config: Any, tp_plan: TpPlan) -> str | None:
    own = getattr(config, "base_model_tp_plan", None) or {}
    changes = {} if isinstance(tp_plan, str) else tp_plan
    plan = own | dict(changes)
    if isinstance(tp_plan, str) and tp_plan != "auto":
        return f"its plan was given as {tp_plan!r}; 'auto' or a style for each module is wanted"
    if not plan:
        return "transformers has no plan for models of its kind; load it in one process"
    return _heads_problem(config, _num_processes()) if _splits_heads(plan) else None


def _num_processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether what makes keys gives each process its own; some gather them, for a norm or a cut."""
    made = (style for name, style in plan.items() if name.split(".")[-1] in _KEY_PROJECTIONS)
    return "colwise" in made


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
