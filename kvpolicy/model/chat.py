"""From messages to the tokens of a prompt, by the chat template of a tokenizer.

Control tokens say whose turn it is and where it ends; they are the template's. What stands in a
message is text, whatever it looks like: a special token in it is encoded letter by letter, as
``split_special_tokens=True`` does. Without one, the tokens are those of `apply_chat_template`.

Three renderings of a template make sure of it:

* The texts of special tokens in messages are *hidden* while the template runs: stand-ins of
  characters that nobody writes. What then looks like a special token is the template's own.
* If anything was hidden, the template's own tokens become added tokens that are not special, so
  that one call encodes these as tokens and the rest, with what was hidden, as text. Letters merge
  over the borders of messages as they do without special tokens.
* A template can also join its own letters with those of a message. In a *skeleton* the first and
  last letters of special tokens, and names as a whole, are replaced in messages: the control tokens
  of the prompt must be those of the skeleton, or the messages are refused.

A content is a text or, of a template for images, a list of parts: ``{"type": "text", "text": ...}``
and ``{"type": "image"}``. Templates read either or both; a text that a template reads in parts only
is given to it as one.
"""

import copy
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AddedToken

from kvpolicy.entry_points import nearest
from kvpolicy.errors import RequestError, error_summary

# Characters for private use: no tokenizer has tokens with them.
_PRIVATE = (0xE000, 0xF8FF)
_NUMBERS = 0xF0000  # the plane from which single tokens are numbered
_STAND_IN = chr(_PRIVATE[0])

# What a template is given anyway.
_GIVEN = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "messages"}
    | {"raise_exception", "strftime_now", "tools"}
)
# Kinds of parts of a content, which are the template's words.
_KINDS = frozenset({"text", "image"})
# A part that a template has written out as it is, instead of reading it.
_WRITTEN_OUT = re.compile(rf"""text["']:\s*["']{_STAND_IN}""")
# A block of transformers' own, which says what a template generates.
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")

Messages = Sequence[Mapping[str, Any]]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


@attrs.frozen
class RenderedChat:
    """Messages in a template, before they are encoded.

    Attributes:
        text: What the template makes of them; special tokens of messages are hidden.
        skeleton: The same without letters of messages that could be part of a special token.
        shown: The text with what is hidden in it.
    """

    text: str
    skeleton: str
    shown: str


class ChatEncoder:
    """Encodes messages by a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Look at the special tokens.

        Args:
            tokenizer: A tokenizer with a chat template; it is not changed.
        """
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token.content: number for number, token in added.items() if token.special}
        self._special = sorted(special, key=len, reverse=True)  # the longest match first
        self._ids = [special[text] for text in self._special]
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        self._hiding, self._marking = _Marks(self._special), _Marks(self._special)
        edges = {edge for text in special for edge in (text[0], text[-1]) if not edge.isspace()}
        self._edges = str.maketrans(dict.fromkeys(edges, _STAND_IN))
        # A tokenizer without bytes writes the unknown token for text, which controls nothing then.
        unknown = tokenizer(_STAND_IN, add_special_tokens=False)["input_ids"]
        self._control = frozenset(self._ids).difference(unknown)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, beside the messages and what goes with them."""
        source = _GENERATION.sub("", self._tokenizer.get_chat_template())
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        read = meta.find_undeclared_variables(environment.parse(source))
        return frozenset(read - _GIVEN - self._tokenizer.special_tokens_map.keys())

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads a content in parts, as those for images do."""
        return self._reads([_text_part(_STAND_IN)])

    @cached_property
    def _reads_texts(self) -> bool:
        return self._reads(_STAND_IN) or not self.reads_parts

    def _reads(self, content: Any) -> bool:
        """Whether the template writes the text of such a content."""
        talk = [{"role": "user", "content": content}]
        try:
            text = str(self._tokenizer.apply_chat_template(talk, tokenize=False))
        except Exception:  # templates are programs
            return False
        return _STAND_IN in text and not _WRITTEN_OUT.search(text)

    def _readable(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message whose content has a form that the template reads."""
        content = message.get("content")
        if isinstance(content, str) and not self._reads_texts:
            return {**message, "content": [_text_part(content)]}
        if isinstance(content, list) and not self.reads_parts:
            msg = (
                "the chat template of this model reads texts alone, and a message has parts; leave "
                "images out"
            )
            raise RequestError(msg)
        return message

    @cached_property
    def _own(self) -> list[str]:
        """The special tokens that the template writes around a user's message."""
        text = self.render([{"role": "user", "content": _STAND_IN}]).text
        return [token for token in self._special if token in text]

    def is_in_template(self, text: str) -> bool:
        """Whether a text has control tokens of the template, so that it was put into it before."""
        return any(token in text for token in self._own)

    def check_variables(self, names: Iterable[str]) -> None:
        """Refuse what the template does not read.

        Args:
            names: Names of variables.

        Raises:
            RequestError: The template does not have one of them.
        """
        for name in names:
            if name not in self.variables:
                msg = (
                    f"the chat template of this model has no variable '{name:.60}'"
                    f"{nearest(name, self.variables)}"
                )
                raise RequestError(msg)

    def tokens(self, messages: Messages, **options: Any) -> list[int]:
        """The tokens of a chat; see `render` for arguments and errors."""
        return self.encode(self.render(messages, **options))

    def render(
        self,
        messages: Messages,
        *,
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> RenderedChat:
        """Put messages into the template.

        Args:
            messages: ``role``, ``content`` and what else the template reads of each. Roles and
                kinds of parts are the template's words; everything else is text of users.
            variables: What the template reads beside the messages; see `variables`.
            generation_prompt: Whether the prompt ends where the next answer begins.
            continue_last: Whether it ends within the last message instead.

        Raises:
            RequestError: The template refuses them, or has no such variable.
        """
        self.check_variables(variables or {})
        readable = [self._readable(one) for one in messages]
        options = {
            "add_generation_prompt": generation_prompt and not continue_last,
            "continue_final_message": continue_last,
        }

        def rendering(change: Callable[[str], str], name: Callable[[str], str]) -> str:
            changed = _changed(readable, change, name)
            given = _changed(dict(variables or {}), change, name)
            try:
                return str(
                    self._tokenizer.apply_chat_template(changed, tokenize=False, **options, **given)
                )
            except Exception as error:  # templates are programs, and raise errors of their own
                what = self._hiding.unmarked(error_summary(error))
                msg = f"the chat template of this model refuses the messages: {what}"
                raise RequestError(msg) from error

        def hide(text: str) -> str:
            return self._pattern.sub(self._hiding.mark, text)

        def without_edges(text: str) -> str:
            return text.translate(self._edges)

        text = rendering(hide, hide)
        skeleton = rendering(without_edges, lambda name: _STAND_IN * len(name))
        return RenderedChat(text, skeleton, self._hiding.unmarked(text))

    def encode(self, chat: RenderedChat) -> list[int]:
        """The tokens of a chat.

        Args:
            chat: What `render` has made.

        Raises:
            RequestError: Text of a message would be read as a control token.
        """
        is_hiding = chat.text != chat.shown
        ids = self._encoded_apart(chat.text) if is_hiding else self._encoded(chat.text)
        if chat.skeleton != chat.text:
            own = self._controls(self._encoded(chat.skeleton))
            found = self._controls(ids)
            if found != own:
                token = self._special[self._ids.index(_first_added(own, found))]
                msg = (
                    f"text of a message would be read as '{token}', a special token of this "
                    "model; leave it out"
                )
                raise RequestError(msg)
        return ids

    def control_texts(self, chat: RenderedChat) -> list[str]:
        """The special tokens whose texts stand in messages, where they are text."""
        return [
            text
            for text, number in zip(self._special, self._ids, strict=True)
            if number in self._control and self._hiding.mark_of[text] in chat.text
        ]

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encoded_apart(self, text: str) -> list[int]:
        """The tokens of a text in which special tokens are tokens, and what is hidden is text."""
        tokenizer, ids = self._apart
        marked = self._hiding.unmarked(self._pattern.sub(self._marking.mark, text))
        encoded = tokenizer(marked, add_special_tokens=False, split_special_tokens=True)
        return [ids.get(token, token) for token in encoded["input_ids"]]

    @cached_property
    def _apart(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer in which the marks of special tokens are tokens that are not special.

        Returns:
            The tokenizer, and the special token of each of the others.
        """
        tokenizer, added = copy.deepcopy(self._tokenizer), self._tokenizer.added_tokens_decoder
        for mark, number in zip(self._marking.marks, self._ids, strict=True):
            like = added[number]
            tokenizer.add_tokens(
                AddedToken(mark, lstrip=like.lstrip, rstrip=like.rstrip, normalized=False)
            )
        others = tokenizer.convert_tokens_to_ids(self._marking.marks)
        return tokenizer, dict(zip(others, self._ids, strict=True))

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._control]


class _Marks:
    """Marks that stand for texts: nobody can guess them, and templates leave them alone."""

    def __init__(self, texts: Sequence[str]) -> None:
        first, last = _PRIVATE
        self.secret = "".join(chr(first + 1 + secrets.randbelow(last - first)) for _ in range(8))
        self.marks = [self.secret + chr(_NUMBERS + number) for number in range(len(texts))]
        self._texts = texts
        self.mark_of = dict(zip(texts, self.marks, strict=True))
        self._pattern = re.compile(f"{self.secret}(.)", re.DOTALL)

    def mark(self, found: re.Match[str]) -> str:
        """The mark of a text that was found."""
        return self.mark_of[found[0]]

    def unmarked(self, text: str) -> str:
        """A text with its marks replaced by what they stand for."""
        return self._pattern.sub(lambda found: self._texts[ord(found[1]) - _NUMBERS], text)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _changed(value: Any, change: Callable[[str], str], name: Callable[[str], str]) -> Any:
    """Data with its texts changed, those of names in a way of their own; roles and kinds stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):

        def kind(text: str) -> str:
            return text if text in _KINDS else change(text)

        by_key: dict[str, Callable[[str], str]] = {"name": name, "role": str, "type": kind}
        return {
            key: by_key[key](one)
            if key in by_key and isinstance(one, str)
            else _changed(one, change, name)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_changed(one, change, name) for one in value]
    return value


def _first_added(own: Sequence[int], found: Sequence[int]) -> int:
    """The first of the tokens found that is not one of its own; else of those that are missing."""
    for at, token in enumerate(found):
        if at >= len(own) or own[at] != token:
            return token
    return own[len(found)]
