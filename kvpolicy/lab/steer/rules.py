"""Rules that tell kinds of thoughts apart by their words: TOML files, found by entry point.

An entry point of the group ``kvpolicy.rules`` gives a name to a package, whose folder holds
``NAME.toml`` with the fields of `ThoughtRules`.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs.validators import min_len

from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.bundled import bundled_file, bundled_names
from kvpolicy.plan.spec import problems_of

GROUP = "kvpolicy.rules"
PUBLISHED = "published"
EXECUTION = "execution"


@attrs.frozen
class Rule:
    """Words by which a kind of thought is known.

    Attributes:
        kind: What such a thought is called.
        starts: A thought that starts with one of these is of this kind.
        contains: A thought with one of these anywhere in it is of this kind.
    """

    kind: str
    starts: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()

    def matches(self, text: str) -> bool:
        """Whether a thought is of this kind, upper and lower case being the same."""
        text = text.strip().lower()
        return text.startswith(tuple(word.lower() for word in self.starts)) or any(
            word.lower() in text for word in self.contains
        )


@attrs.frozen
class Scope:
    """The thoughts of a trace that are compared; all of them unless said otherwise.

    Attributes:
        after: Regular expression; only thoughts after the first one it is found in.
        before: Likewise; only thoughts before the first one it is found in.
    """

    after: str | None = None
    before: str | None = None

    def __attrs_post_init__(self) -> None:
        for pattern in (self.after, self.before):
            re.compile(pattern or "")

    def within(self, texts: Sequence[str]) -> range:
        """Which thoughts of a trace are compared.

        Args:
            texts: The thoughts in order.

        Returns:
            Their places among ``texts``.
        """
        first = 0 if self.after is None else _first(self.after, texts) + 1
        end = len(texts) if self.before is None else _first(self.before, texts)
        return range(first, end)


@attrs.frozen
class ThoughtRules:
    """Kinds of thoughts, and which thoughts are compared.

    Attributes:
        rules: Asked in order; the first that matches decides.
        scope: The thoughts that are compared.
        source: Who says so.
        name: What the user typed.
    """

    rules: tuple[Rule, ...] = attrs.field(validator=min_len(1))
    scope: Scope = Scope()
    source: str = ""
    name: str = ""

    def kind_of(self, text: str) -> str:
        """Tell what kind of thought a text is; ``"execution"`` if no rule matches."""
        return next((rule.kind for rule in self.rules if rule.matches(text)), EXECUTION)

    def digest(self) -> str:
        """Hash of everything that decides which thought is what."""
        decisive = {"rules": attrs.asdict(self)["rules"], "scope": attrs.asdict(self.scope)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def load_rules(name_or_path: str) -> ThoughtRules:
    """Read rules.

    Args:
        name_or_path: Name of installed rules, or path of a TOML file.

    Returns:
        The rules.

    Raises:
        KVPolicyError: There are no such rules, or they cannot be read or make no sense.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = bundled_file(GROUP, name_or_path, suffix=".toml", what="set of rules")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"rules {name_or_path} cannot be read: {error.strerror}"
        raise KVPolicyError(msg) from error
    except ValueError as error:
        msg = f"rules {name_or_path} are not valid TOML: {error}"
        raise KVPolicyError(msg) from error
    return _structure(data, path.stem, name_or_path)


def default_rules(task: str) -> str:
    """Name of the rules for a task: those of its own name if there are any.

    Args:
        task: Name of the task.
    """
    return task if task in bundled_names(GROUP) else PUBLISHED


def _structure(data: dict[str, Any], name: str, what: str) -> ThoughtRules:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _words)
    try:
        return attrs.evolve(converter.structure(data, ThoughtRules), name=name)
    except cattrs.BaseValidationError as error:
        msg = f"rules '{what}': {problems_of(error)[0]}"
        raise KVPolicyError(msg) from error


def _words(value: object, _: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        msg = f'{value!r} is no list of words; write for example ["Wait"]'
        raise TypeError(msg)
    return tuple(value)


def _first(pattern: str, texts: Sequence[str]) -> int:
    """Place of the first thought that a pattern is found in; behind the last if in none."""
    return next((i for i, text in enumerate(texts) if re.search(pattern, text)), len(texts))
