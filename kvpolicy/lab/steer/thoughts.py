r"""Thoughts of a trace and their kinds, as in SEAL.

Inside the thinking part, a token whose text contains ``"\n\n"`` ends a thought and precedes the
next. The hidden state at this token represents the thought that follows, because steering has to
act there to change how the model continues.

Rules assign a kind to each thought by its words. An entry point of the group ``kvpolicy.rules``
names a package whose folder holds ``NAME.toml`` with the fields of `ThoughtRules`.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
from attrs.validators import min_len

from kvpolicy.entry_points import installed, installed_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import read_toml
from kvpolicy.plan.spec import problems_of

if TYPE_CHECKING:
    from kvpolicy.toolkit.paragraphs import Paragraphs

GROUP = "kvpolicy.rules"
PUBLISHED = "published"
EXECUTION = "execution"


@attrs.frozen
class Rule:
    """Words that identify a kind of thought; upper and lower case are the same.

    Attributes:
        kind: Name of the kind.
        starts: A thought that starts with one of these is of this kind.
        contains: A thought that contains one of these is of this kind.
    """

    kind: str
    starts: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()

    def matches(self, text: str) -> bool:
        """Whether a thought is of this kind."""
        text = text.strip().lower()
        return text.startswith(tuple(word.lower() for word in self.starts)) or any(
            word.lower() in text for word in self.contains
        )


@attrs.frozen
class Scope:
    """The thoughts of a trace that are compared; by default all of them.

    Attributes:
        after: Regular expression; only thoughts after the first that matches are compared.
        before: Regular expression; only thoughts before the first that matches are compared.
    """

    after: str | None = None
    before: str | None = None

    def __attrs_post_init__(self) -> None:
        for pattern in (self.after, self.before):
            re.compile(pattern or "")

    def within(self, texts: Sequence[str]) -> range:
        """Indices of the thoughts that are compared.

        Args:
            texts: The thoughts of a trace, in order.
        """
        first = 0 if self.after is None else _first_match(self.after, texts) + 1
        end = len(texts) if self.before is None else _first_match(self.before, texts)
        return range(first, end)


@attrs.frozen
class ThoughtRules:
    """Kinds of thoughts, and which thoughts are compared.

    Attributes:
        rules: The first that matches decides.
        scope: The thoughts that are compared.
        source: Origin of the rules.
        name: What the user typed.
    """

    rules: tuple[Rule, ...] = attrs.field(validator=min_len(1))
    scope: Scope = Scope()
    source: str = ""
    name: str = ""

    def kind_of(self, text: str) -> str:
        """Kind of a thought; ``"execution"`` if no rule matches."""
        return next((rule.kind for rule in self.rules if rule.matches(text)), EXECUTION)

    def digest(self) -> str:
        """Hash of the rules and the scope."""
        decisive = {"rules": attrs.asdict(self)["rules"], "scope": attrs.asdict(self.scope)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


@attrs.frozen
class Thought:
    """One thought of a trace.

    Attributes:
        position: Index of the delimiter token before it, counted from the start of the prompt.
        kind: ``"execution"``, or the kind of the rule that matches.
        text: Its text, without surrounding white space.
    """

    position: int
    kind: str
    text: str


def load_rules(name_or_path: str) -> ThoughtRules:
    """Read rules.

    Args:
        name_or_path: Name of installed rules, or path of a TOML file.

    Raises:
        KVPolicyError: There are no such rules, or the file is unreadable or malformed.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = installed_file(GROUP, name_or_path, suffix=".toml", what="set of rules")
    data = read_toml(path, f"file of rules {name_or_path}")
    return _structure(data, path.stem, name_or_path)


def rules_for(*names: str) -> str:
    """Name of the rules for a task or a model: those of its own name, or the published ones.

    Args:
        names: Names as typed, the more telling first; options after a colon do not count.
    """
    available = installed(GROUP)
    plain = [name.partition(":")[0] for name in names]
    return next((name for name in plain if name in available), PUBLISHED)


def find_thoughts(
    token_ids: Sequence[int],
    prompt_len: int,
    tokenizer: Any,
    paragraphs: "Paragraphs",
    rules: ThoughtRules,
) -> list[Thought]:
    """Split a trace into thoughts and assign their kinds.

    Only generated delimiters count, because only there can a model be steered; so the text before
    the first of them is no thought. Empty thoughts are left out.

    Args:
        token_ids: Prompt and generation.
        prompt_len: Tokens of the prompt.
        tokenizer: The tokenizer.
        paragraphs: Its delimiters and tags, on the CPU.
        rules: Kinds, and which thoughts are compared.

    Returns:
        The thoughts that are compared, in order.
    """
    thoughts = []
    for position, end in _spans(token_ids, prompt_len, paragraphs):
        text = tokenizer.decode(token_ids[position + 1 : end], skip_special_tokens=True).strip()
        if text:
            thoughts.append(Thought(position, rules.kind_of(text), text))
    return [thoughts[i] for i in rules.scope.within([thought.text for thought in thoughts])]


def _spans(
    token_ids: Sequence[int], prompt_len: int, paragraphs: "Paragraphs"
) -> list[tuple[int, int]]:
    """For each thought, the position of the delimiter before it and its end."""
    import torch  # reports read rules without torch

    from kvpolicy.toolkit.paragraphs import look_up

    ids = torch.tensor(token_ids)
    delimiters = look_up(paragraphs.delimiters, ids).tolist()
    inside = torch.tensor([float(paragraphs.thinking_after(ids[:prompt_len]))])
    spans: list[tuple[int, int]] = []
    start: int | None = None
    for position in range(prompt_len, len(token_ids)):
        paragraphs.update(inside, ids[position : position + 1])
        is_inside = bool(inside)
        if start is not None and (delimiters[position] or not is_inside):
            spans.append((start, position + delimiters[position]))
            start = None
        if is_inside and delimiters[position]:
            start = position
    return spans if start is None else [*spans, (start, len(token_ids))]


def _structure(data: dict[str, Any], name: str, shown: str) -> ThoughtRules:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _word_list)
    try:
        return attrs.evolve(converter.structure(data, ThoughtRules), name=name)
    except cattrs.BaseValidationError as error:
        msg = f"rules '{shown}': {problems_of(error)[0]}"
        raise KVPolicyError(msg) from error


def _word_list(value: object, _: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        msg = f'{value!r} is not a list of words; write for example ["Wait"]'
        raise TypeError(msg)
    return tuple(value)


def _first_match(pattern: str, texts: Sequence[str]) -> int:
    """Index of the first text that matches; the number of texts if none does."""
    return next((i for i, text in enumerate(texts) if re.search(pattern, text)), len(texts))
