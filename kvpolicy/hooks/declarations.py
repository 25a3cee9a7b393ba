"""What a policy declares, checked when its stack is built: its attributes, and its hooks."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from kvpolicy import hookspecs
from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.entry_points import nearest
from kvpolicy.errors import PolicyLoadError, shown
from kvpolicy.markers import PROJECT, hook_options
from kvpolicy.plugin_code import declared_by, plugin_code
from kvpolicy.validators import MAX_COUNT

REFERENCE = "docs/reference/hooks.md"

_SPECS = {
    name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec")
}

# In the order in which the engine calls them.
HOOKS = tuple(_SPECS)

ARGUMENTS = {name: tuple(inspect.signature(value).parameters) for name, value in _SPECS.items()}

# Hooks of which the first answer counts.
FIRST_RESULT = frozenset(
    name for name, value in _SPECS.items() if getattr(value, f"{PROJECT}_spec")["firstresult"]
)

# Methods that turn the memory of a sequence into plain data, and back; not hooks.
PACKING = ("pack_memory", "unpack_memory")

# Hooks that every policy is asked on its own, because an answer belongs to its policy.
ASKED_EACH = ("bind", "annotate")

# Hooks that need an attribute, and what to write for it.
_NEEDED = {
    "annotate": ("tracks", 'write tracks: ClassVar[tuple[str, ...]] = ("NAME",)'),
    "lookahead": (
        "lookahead_size",
        "give it the most tokens of a lookahead, such as lookahead_size: ClassVar[int] = 8",
    ),
}

# What policies declared once, and what they write in its place.
_REPLACED = {
    "inactive_hooks": 'write @hookimpl(when="NAME") at the hook, with the attribute that is true '
    "where the hook is there",
    "layers_alike": "leave it out: layers are alike to a policy whose due, protect, score and "
    "select name neither layer_idx nor bound",
}

MAX_WINDOW = 2**16  # queries; every slot has memory for as many

_MISSING = object()


# Attributes


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_window(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_WINDOW


def _is_lookahead(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_WINDOW


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_list(value: object, check: Callable[[object], bool]) -> bool:
    return isinstance(value, (tuple, list)) and all(check(one) for one in value)


def _are_names(value: object) -> bool:
    return _is_list(value, lambda one: type(one) is str and one != "") and not _has_twice(value)


def _has_twice(value: Any) -> bool:
    return len(set(value)) < len(value)


def _are_tracks(value: object) -> bool:
    return _are_names(value) and not any(name in ACCUMULATORS for name in value)  # type: ignore[attr-defined]


def _are_counts(value: object) -> bool:
    return _is_list(value, _is_count) and len(value) == 2  # type: ignore[arg-type]


def _are_layers(value: object) -> bool:
    return value is None or _is_list(value, _is_count)


def _is_reason(value: object) -> bool:
    return value is None or (type(value) is str and value != "")


def _are_parts(value: object) -> bool:
    def is_pair(one: object) -> bool:
        return isinstance(one, (tuple, list)) and len(one) == 2 and type(one[0]) is str

    return _is_list(value, is_pair)


def _declaration(default: object, check: Callable[[object], bool], expected: str) -> Any:
    metadata = {"check": check, "expected": expected}
    return attrs.field(default=default, metadata=metadata)


@attrs.frozen(eq=False)
class Declarations:
    """The attributes of one policy that the engine reads; docs/reference/hooks.md lists them."""

    window_size: int = _declaration(1, _is_window, f"a number of queries from 1 to {MAX_WINDOW:,}")
    tracks: tuple[str, ...] = _declaration(
        (),
        _are_tracks,
        f'a tuple of distinct names other than {", ".join(ACCUMULATORS)}, such as ("name",)',
    )
    registers: tuple[str, ...] = _declaration(
        (), _are_names, 'a tuple of distinct names, such as ("name",)'
    )
    protects: tuple[int, int] = _declaration(
        (0, 0), _are_counts, "two numbers of rows (first, newest), such as (4, 0)"
    )
    parts: tuple[tuple[str, object], ...] = _declaration(
        (), _are_parts, 'pairs of a name and a policy, such as [("name", policy)]'
    )
    bounded: bool = _declaration(True, _is_bool, "True or False")
    annotates_in_step: bool = _declaration(False, _is_bool, "True or False")
    ragged: bool = _declaration(False, _is_bool, "True or False")
    needs_shared_heads: bool = _declaration(False, _is_bool, "True or False")
    no_effect: str | None = _declaration(
        None, _is_reason, 'None, or why it has no effect, such as "it has no table"'
    )
    gives_mass: bool = _declaration(False, _is_bool, "True or False")
    needs_mass: bool = _declaration(False, _is_bool, "True or False")
    steers: tuple[int, ...] | None = _declaration(
        None, _are_layers, "layers counted from 0, such as (2, 3)"
    )
    lookahead_size: int = _declaration(0, _is_lookahead, f"a number of tokens up to {MAX_WINDOW:,}")
    cuts_prompts: bool = _declaration(True, _is_bool, "True or False")
    stages_prompts: bool = _declaration(True, _is_bool, "True or False")


def read_declarations(who: str, policy: object) -> Declarations:
    """Read and check the attributes of a policy.

    Args:
        who: The policy in messages, as in ``"policy 'NAME'"``.
        policy: The policy.

    Raises:
        PolicyLoadError: An attribute raises, has a value of another kind, or is read no more.
    """
    for name, instead in _REPLACED.items():
        if inspect.getattr_static(policy, name, _MISSING) is not _MISSING:
            msg = f"{who} declares {name}, which nothing reads; {instead}"
            raise PolicyLoadError(msg)
    found = {}
    for field in attrs.fields(Declarations):
        with plugin_code(
            f"{who} cannot be used: its attribute '{field.name}' raises", PolicyLoadError
        ):
            value = declared_by(policy, field.name, _MISSING)
            if value is _MISSING:
                continue
            is_valid = field.metadata["check"](value)
        if not is_valid:
            msg = f"{who} declares {field.name} = {shown(value)}; give {field.metadata['expected']}"
            raise PolicyLoadError(msg)
        found[field.name] = value
    _check_packing(who, policy)
    return Declarations(**found)


def check_needed(who: str, declared: Declarations, hooks: Collection[str]) -> None:
    """Check that a policy declares what the hooks that it implements need.

    Raises:
        PolicyLoadError: It does not.
    """
    for hook, (attribute, advice) in _NEEDED.items():
        if hook in hooks and not getattr(declared, attribute):
            msg = f"{who} implements {hook}() and declares no {attribute}; {advice}"
            raise PolicyLoadError(msg)


def _check_packing(who: str, policy: object) -> None:
    """Check that a policy has both methods that turn its memory into plain data and back."""
    missing = [name for name in PACKING if declared_by(policy, name, _MISSING) is _MISSING]
    if len(missing) == 1:
        (given,) = set(PACKING) - set(missing)
        msg = f"{who} has a method {given}() and no {missing[0]}(); give it both, or neither"
        raise PolicyLoadError(msg)


# Hooks


def check_hooks(who: str, policy: object) -> None:
    """Check that the hooks of a policy exist and name arguments that exist.

    Args:
        who: The policy in messages.
        policy: The policy.

    Raises:
        PolicyLoadError: A hook cannot be called as its specification says, or there is none.
    """
    problem, num_hooks = None, 0
    with plugin_code(f"{who} cannot be used", PolicyLoadError):
        for name in dir(policy):
            if name.startswith("__"):
                continue
            attribute = inspect.getattr_static(policy, name, None)
            options = hook_options(attribute)
            if options is not None and problem is None:
                num_hooks += 1
                hook = options.get("specname") or name
                problem = _hook_problem(hook, attribute, options)
                problem = problem or _condition_problem(hook, policy, options["when"])
    if problem is not None:
        msg = f"{who} does not fit the hook specs: {problem}"
        raise PolicyLoadError(msg)
    # What a policy protects is declared, and needs no hook.
    protects = inspect.getattr_static(policy, "protects", _MISSING) is not _MISSING
    if not num_hooks and not protects:
        msg = (
            f"{who} implements no hook; decorate at least one method with @kvpolicy.hookimpl, "
            f"see {REFERENCE}"
        )
        raise PolicyLoadError(msg)


def _hook_problem(hook: str, attribute: object, options: Mapping[str, Any]) -> str | None:
    """Why an attribute cannot be the implementation of a hook, or ``None``."""
    if hook not in HOOKS:
        return f"there is no hook '{hook}'{nearest(hook, HOOKS)}"
    is_static = type(attribute) is staticmethod
    if type(attribute) in (staticmethod, classmethod):
        attribute = attribute.__func__  # type: ignore[attr-defined]
    function = inspect.unwrap(attribute)  # type: ignore[arg-type]
    if not inspect.isfunction(function):
        return f"{hook}() is {shown(attribute)}, and a hook is a method written with def"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return f"{hook}() is async, and hooks are called without waiting; write a plain def"
    if options.get("hookwrapper"):
        return f"{hook}() is a hookwrapper; write @hookimpl(wrapper=True), and return the answer"
    is_wrapper = bool(options.get("wrapper"))
    if is_wrapper and hook in ASKED_EACH:
        return f"{hook}() is a wrapper, and every policy is asked for its own {hook}()"
    if inspect.isgeneratorfunction(function) != is_wrapper:
        if is_wrapper:
            return f"{hook}() is declared as a wrapper and has no yield"
        return f"{hook}() yields, which only wrappers do; write @hookimpl(wrapper=True)"
    parameters = list(inspect.signature(function).parameters.values())
    if not is_static:
        if not parameters or parameters[0].name in ARGUMENTS[hook]:
            return f"{hook}() has no 'self' as its first argument"
        del parameters[0]
    problems = (_parameter_problem(hook, parameter) for parameter in parameters)
    return next(filter(None, problems), None)


def _condition_problem(hook: str, policy: object, when: object) -> str | None:
    """Why nobody can say whether a hook is there, or ``None``."""
    if when is None or callable(when):
        return None
    if not isinstance(when, str):
        return (
            f"{hook}() is there when {shown(when)}; give the name of an attribute, or a function "
            "of the policy"
        )
    if inspect.getattr_static(policy, when, _MISSING) is not _MISSING:
        return None
    known = [name for name in dir(policy) if not name.startswith("_")]
    return (
        f"{hook}() is there when the attribute '{when}' is true, and there is none"
        f"{nearest(when, known)}"
    )


def _parameter_problem(hook: str, parameter: inspect.Parameter) -> str | None:
    name, known = parameter.name, ARGUMENTS[hook]
    has_default = parameter.default is not parameter.empty
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return f"{hook}() takes '{parameter}', which receives nothing; name the arguments it reads"
    if parameter.kind is parameter.KEYWORD_ONLY and not has_default:
        return f"{hook}() takes '{name}' by keyword only; leave out the *"
    if has_default:
        if name not in known:
            return None
        return f"{hook}() gives '{name}' a default, and would always get that; leave it out"
    return None if name in known else f"{hook}() has no argument '{name}'{nearest(name, known)}"
