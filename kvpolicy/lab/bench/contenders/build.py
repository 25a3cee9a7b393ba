"""All contenders of a benchmark."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import attrs
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import (
    CONTINUOUS,
    FIRST_PLAN,
    FULL,
    GENERATE,
    KVPRESS,
    LIMIT,
    MODEL_ALONE,
    VLLM,
    Contender,
)
from kvpolicy.lab.bench.contenders.engine import engine_under, evicts
from kvpolicy.lab.bench.contenders.generate import generate
from kvpolicy.lab.bench.contenders.generate_batch import continuous_batching
from kvpolicy.lab.bench.contenders.kvpress import presses_for
from kvpolicy.lab.bench.contenders.machine_limit import machine_limit
from kvpolicy.lab.bench.contenders.model_alone import model_alone
from kvpolicy.lab.sweep.grid import Cell

# What can be left out, besides vLLM, which is started by who wants it.
OPTIONAL = (GENERATE, CONTINUOUS, KVPRESS, MODEL_ALONE, LIMIT)


@attrs.frozen
class Contenders:
    """The contenders, and what is absent.

    Attributes:
        all: The contenders in the order of tables.
        absent: Libraries that cannot take part, with the reason.
    """

    all: tuple[Contender, ...]
    absent: dict[str, str]


def build_contenders(
    models: Mapping[str, PreTrainedModel], cells: Sequence[Cell], *, without: Collection[str] = ()
) -> Contenders:
    """All contenders in this process.

    Args:
        models: The model by what its weights are called in names: empty for plain weights. Others
            are the same model with its weights in another form, and each is compared with
            ``generate`` of the same form.
        cells: The engine's plans.
        without: Names of `OPTIONAL` to leave out.

    Returns:
        The limit, then for each model: the model alone, ``generate`` and ``generate_batch``, and
        each plan followed by kvpress with the same policy, if it has it.

    Raises:
        KVPolicyError: Two contenders have the same name, or ``without`` has an unknown name.
    """
    if unknown := sorted(set(without) - set(OPTIONAL)):
        msg = f"--without was given {unknown[0]!r}; give some of {', '.join(OPTIONAL)}"
        raise KVPolicyError(msg)
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for weights, model in models.items():
        found, missing = _with_weights(model, cells, without)
        contenders += [_named(one, weights) for one in found]
        absent |= missing
    if LIMIT not in without:
        contenders.insert(0, machine_limit(models[""]))
    _check_names(contenders)
    return Contenders(tuple(contenders), absent)


def _with_weights(
    model: PreTrainedModel, cells: Sequence[Cell], without: Collection[str]
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders with one form of the weights, and what is absent."""
    absent: dict[str, str] = {}
    contenders = [one for one in (model_alone(model), generate(model)) if one.name not in without]
    if CONTINUOUS not in without:
        batching, reason = continuous_batching(model)
        contenders += [] if batching is None else [batching]
        absent |= {} if reason is None else {CONTINUOUS: reason}
    presses: dict[str, Contender] = {}
    if KVPRESS not in without:
        presses, reason = presses_for(model, cells)
        absent |= {} if reason is None else {KVPRESS: reason}
    for cell in cells:
        references = _references(cell, cells)
        press = presses.get(cell.digest)
        if press is not None:
            references[KVPRESS] = press.name
        contenders += [engine_under(model, cell, references=references)]
        contenders += [] if press is None else [press]
    return contenders, absent


def _references(cell: Cell, cells: Sequence[Cell]) -> dict[str, str]:
    """With whom a plan is compared: among others with the full cache, and with the first plan.

    The difference to the first plan that keeps as many rows is what a policy costs more than that.
    """
    references = {name: name for name in (GENERATE, MODEL_ALONE, VLLM)}
    for other in cells:
        if not evicts(other):
            references.setdefault(FULL, other.series)
        elif evicts(cell) and _rows(other) == _rows(cell):
            references.setdefault(FIRST_PLAN, other.series)
    if references.get(FIRST_PLAN) == cell.series:
        del references[FIRST_PLAN]
    return references


def _rows(cell: Cell) -> list[tuple[int | None, int]]:
    """Budget and buffer of each layer."""
    return [(layer.budget, layer.buffer) for layer in cell.resolved.layers]


def _named(contender: Contender, weights: str) -> Contender:
    """Name a contender, and those that it is compared with, after its weights."""
    if not weights:
        return contender
    # vLLM has one form of the weights, which is packed on a CPU.
    references = {
        called: name if name == VLLM else f"{name}, {weights}"
        for called, name in contender.references.items()
    }
    return attrs.evolve(contender, name=f"{contender.name}, {weights}", references=references)


def _check_names(contenders: Sequence[Contender]) -> None:
    """Raise `KVPolicyError` if two contenders have the same name."""
    if not contenders:
        return
    (name, count), *_ = Counter(one.name for one in contenders).most_common(1)
    if count > 1:
        msg = (
            f"bench was given {count} contenders called {name!r}, which tables could not "
            "distinguish; the name of a plan file without its suffix is the name: rename one."
        )
        raise KVPolicyError(msg)
