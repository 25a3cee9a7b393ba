"""All contenders of a benchmark."""

from collections import Counter
from collections.abc import Collection, Sequence

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import (
    CONTINUOUS,
    FIRST_PLAN,
    FORWARD,
    FULL,
    GENERATE,
    KVPRESS,
    LIMIT,
    MODEL_ALONE,
    PRODUCTS_ALONE,
    RIVALS,
    Contender,
)
from kvpolicy.lab.bench.contenders.engine import engine_under, evicts
from kvpolicy.lab.bench.contenders.form import COMPILED, PACKED, Form
from kvpolicy.lab.bench.contenders.forward import forward
from kvpolicy.lab.bench.contenders.generate import generate
from kvpolicy.lab.bench.contenders.generate_batch import continuous_batching
from kvpolicy.lab.bench.contenders.kvpress import presses_for
from kvpolicy.lab.bench.contenders.machine_limit import machine_limit
from kvpolicy.lab.bench.contenders.model_alone import model_alone
from kvpolicy.lab.bench.contenders.products_alone import products_alone
from kvpolicy.lab.bench.contenders.rivals.known import KNOWN
from kvpolicy.lab.sweep.grid import Cell

# What can be left out, besides other engines, which are started by who wants them.
OPTIONAL = (GENERATE, CONTINUOUS, KVPRESS, PRODUCTS_ALONE, MODEL_ALONE, LIMIT)


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
    forms: Sequence[Form], cells: Sequence[Cell], *, without: Collection[str] = ()
) -> Contenders:
    """All contenders in this process.

    Args:
        forms: Forms of the model, the first as it is. Each is compared with ``generate`` of the
            same form.
        cells: The engine's plans.
        without: Names of `OPTIONAL` to leave out.

    Returns:
        The limit, then for each form: its products alone on a CPU, the model alone, ``generate``,
        the forward of a prompt, ``generate_batch``, and each plan followed by kvpress with the same
        policy, if it has it. Prompts are not compiled, nor ``generate_batch`` and kvpress, which
        change the model while they run.

    Raises:
        KVPolicyError: Two contenders have the same name, or ``without`` has an unknown name.
        ModelError: The model cannot be compiled here.
    """
    if unknown := sorted(set(without) - set(OPTIONAL)):
        msg = f"--without was given {unknown[0]!r}; give some of {', '.join(OPTIONAL)}"
        raise KVPolicyError(msg)
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for form in forms:
        found, missing = _in_form(form, cells, without)
        contenders += [_named(one, form.name) for one in found]
        absent |= missing
    if LIMIT not in without:
        contenders.insert(0, machine_limit(forms[0].model))
    _check_names(contenders)
    return Contenders(tuple(contenders), absent)


def _in_form(
    form: Form, cells: Sequence[Cell], without: Collection[str]
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders with one form of the model, and what is absent."""
    absent: dict[str, str] = {}
    alone = model_alone(form.called, is_compiled=form.is_compiled)
    everywhere = [alone, generate(form.called)]
    if form.model.device.type == "cpu" and not form.is_compiled:  # on a GPU, see the profile
        everywhere.insert(0, products_alone(form.model))
    contenders = [one for one in everywhere if one.name not in without]
    contenders += [] if form.is_compiled else [forward(form.model)]
    if CONTINUOUS not in without and not form.is_compiled:
        batching, reason = continuous_batching(form.model)
        contenders += [] if batching is None else [batching]
        absent |= {} if reason is None else {CONTINUOUS: reason}
    presses: dict[str, Contender] = {}
    if KVPRESS not in without and not form.is_compiled:
        presses, reason = presses_for(form.model, cells)
        absent |= {} if reason is None else {KVPRESS: reason}
    for cell in cells:
        references = _references(cell, cells)
        press = presses.get(cell.digest)
        if press is not None:
            references[KVPRESS] = press.name
        contenders += [
            engine_under(form.model, cell, references=references, compile=form.is_compiled)
        ]
        contenders += [] if press is None else [press]
    return contenders, absent


def _references(cell: Cell, cells: Sequence[Cell]) -> dict[str, str]:
    """With whom a plan is compared: among others with the full cache, and with the first plan.

    The difference to the first plan that keeps as many rows is what a policy costs more than that.
    """
    references = {name: name for name in (GENERATE, MODEL_ALONE, *RIVALS, FORWARD)}
    for other in cells:
        if not evicts(other):
            references.setdefault(FULL, other.series)
        elif evicts(cell) and _rows(other) == _rows(cell):
            references.setdefault(FIRST_PLAN, other.series)
    if references.get(FIRST_PLAN) == cell.series:
        del references[FIRST_PLAN]
    return references


def _rows(cell: Cell) -> list[object]:
    """Budget, buffer and precision of each layer."""
    return [(layer.budget, layer.buffer, layer.rows) for layer in cell.resolved.layers]


def _named(contender: Contender, form: str) -> Contender:
    """Name a contender, and those that it is compared with, after the form of the model."""
    if not form:
        return contender
    # Other engines have forms of their own, and reorder weights in any of them.
    references = {
        called: KNOWN[name].contender_name(form) if name in KNOWN else f"{name}, {form}"
        for called, name in contender.references.items()
    }
    return attrs.evolve(
        contender,
        name=f"{contender.name}, {form}",
        references=references,
        has_limit=form in (PACKED, COMPILED),  # in others, weights have fewer bytes
    )


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
