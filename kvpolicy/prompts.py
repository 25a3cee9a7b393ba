"""Prompts with ids: texts, token ids or chats, and how they are put into a chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.errors import KVPolicyError, RequestError

if TYPE_CHECKING:
    from kvpolicy.engine.requests.request import Request
    from kvpolicy.model.chat import ChatEncoder

#: What a prompt may have of its own, by the names of `Request` and `Sampling`.
LIMITS = ("max_new_tokens", "min_new_tokens", "stop")
SAMPLING = ("min_p", "repetition_penalty", "seed", "temperature", "top_k", "top_p")


@attrs.frozen
class Prompt:
    """One prompt.

    Attributes:
        id: Its id in a JSON line, or else its number, counted from 0.
        content: A text, or token ids; empty for a chat.
        messages: The messages of a chat, to be put into the model's chat template.
        own: Limits and sampling of its own, by the names of `Request` and `Sampling`.
        place: Where it was read, for messages.
    """

    id: int | str
    content: str | list[int]
    messages: tuple[dict[str, str], ...] = ()
    own: Mapping[str, Any] = attrs.field(factory=dict)
    place: str = "the prompt"

    def request(self, defaults: "Request") -> "Request":
        """The request for this prompt, which is no chat any more.

        Args:
            defaults: Limits and sampling where it has none of its own.

        Raises:
            KVPolicyError: One of its own is out of range.
        """
        sampling = {key: self.own[key] for key in SAMPLING if key in self.own}
        limits = {key: self.own[key] for key in LIMITS if key in self.own}
        return attrs.evolve(
            defaults,
            prompt=self.content,
            sampling=attrs.evolve(defaults.sampling, **sampling),
            **limits,
        )


@attrs.frozen
class Chat:
    """How texts become prompts.

    Attributes:
        raw: Whether they are taken as they are, and not put into the model's chat template.
        system: What stands before them as the system's message, if anything.
    """

    raw: bool = False
    system: str | None = None


class ChatPrompts:
    """Puts prompts into the model's chat template, up to where its answer begins.

    Messages always are, and texts as a user's message where the tokenizer has a template. What has
    control tokens of the template in it was put into it before, and is left as it is, as are token
    ids, and a text of which the tokenizer knows nothing, which is refused later.
    """

    def __init__(self, tokenizer: Any, chat: Chat) -> None:
        self._tokenizer, self._chat = tokenizer, chat

    @property
    def note(self) -> str | None:
        """What to tell a user whose texts are wrapped; ``None`` where none is."""
        if self._chat.raw or not self._has_template:
            return None
        return "texts are put into the chat template of this model; --raw leaves it out."

    def wraps(self, prompt: Prompt) -> bool:
        """Whether a prompt is a text that is put into the template."""
        text = prompt.content
        if self._chat.raw or prompt.messages or not isinstance(text, str) or not text.strip():
            return False
        if not self._has_template or self._encoder.is_in_template(text):
            return False
        return bool(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encoded(self, prompt: Prompt) -> Prompt:
        """A prompt with the tokens of its chat, if it is one.

        Args:
            prompt: The prompt.

        Raises:
            RequestError: The template refuses the messages.
            KVPolicyError: There is none.
        """
        messages: Sequence[Mapping[str, str]] = prompt.messages
        if self.wraps(prompt):
            system, user = self._chat.system, prompt.content
            before = [] if system is None else [{"role": "system", "content": system}]
            messages = [*before, {"role": "user", "content": str(user)}]
        if not self._has_template and (messages or self._chat.system is not None):
            what = f"{prompt.place} has messages" if messages else "--system was given"
            hint = 'write a "prompt" instead' if messages else "omit --system"
            msg = f"{what}, and this model's tokenizer has no chat template; {hint}."
            raise KVPolicyError(msg)
        if not messages:
            return prompt
        try:
            tokens = self._encoder.tokens(messages)
        except RequestError as error:
            msg = f"{prompt.place}: {error}."
            raise RequestError(msg) from error
        return attrs.evolve(prompt, content=tokens)

    @cached_property
    def _has_template(self) -> bool:
        from kvpolicy.model.chat import has_chat_template

        return has_chat_template(self._tokenizer)

    @cached_property
    def _encoder(self) -> "ChatEncoder":
        from kvpolicy.model.chat import ChatEncoder

        return ChatEncoder(self._tokenizer)
