"""Fields of other servers that this one does not have: the values that change nothing.

The one list of them: bodies are checked by it, the reference prints it, and a test holds it against
the parameters of the `openai` package. What is served are the fields of `kvpolicy.serve.bodies`.
"""

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen
class Unserved:
    """A field without an effect here.

    Attributes:
        harmless: Values that change nothing of an answer, and are taken; null always is.
            ``None``: all of them are.
        where: Another field and its value, with which any value of this one changes nothing.
        instead: What to do for the others.
    """

    harmless: tuple[object, ...] | None = None
    where: tuple[str, object] | None = None
    instead: str = "leave it out"

    def takes(self, value: object, body: Mapping[str, Any]) -> bool:
        """Whether a value changes nothing.

        Args:
            value: The value.
            body: The object that it is in.
        """
        if value is None or self.harmless is None:
            return True
        if self.where is not None and body.get(self.where[0]) == self.where[1]:
            return True
        return any(
            value == one and isinstance(value, bool) is isinstance(one, bool)  # 0 is not false
            for one in self.harmless
        )

    @property
    def plain_schema(self) -> dict[str, Any]:
        """The values that it takes by itself, as a schema of JSON."""
        return {} if self.harmless is None else {"enum": [None, *self.harmless]}

    @property
    def schema(self) -> dict[str, Any]:
        """The values that it takes, with others or by itself, as a schema of JSON."""
        return {} if self.where is not None else self.plain_schema


def _only(*harmless: object, instead: str = "leave it out") -> Unserved:
    return Unserved(harmless, instead=instead)


_ANY = Unserved()
_NONE = _only()
_PENALTY = "repetition_penalty is like it"
_TOKEN_IDS = 'ask for {"kvpolicy": {"token_ids": true}}'

REQUEST: Mapping[str, Unserved] = {
    # Notes of a client, and how its prompts are kept elsewhere
    "metadata": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_options": _ANY,
    "prompt_cache_retention": _ANY,
    "safety_identifier": _ANY,
    "service_tier": _ANY,
    "store": _ANY,
    "user": _ANY,
    # Sampling
    "allowed_token_ids": _only([]),
    "bad_words": _only([]),
    "best_of": _only(1, instead="choose among the n choices"),
    "early_stopping": _only(False),
    "length_penalty": _only(1),
    "logits_processors": _only([]),
    "mirostat": _only(0),
    "repeat_penalty": _only(1, instead=_PENALTY),
    "tfs_z": _only(1),
    "typical_p": _only(1),
    "use_beam_search": _only(False),
    # Tools and the form of an answer
    "function_call": _only("none", "auto"),
    "functions": Unserved(
        ([],), where=("function_call", "none"), instead='send "function_call": "none" with it'
    ),
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "parallel_tool_calls": _ANY,
    "response_format": _only({"type": "text"}, instead="ask for the form in a message"),
    "structured_outputs": _NONE,
    "tool_choice": _only("none", "auto"),
    "tools": Unserved(
        ([],), where=("tool_choice", "none"), instead='send "tool_choice": "none" with it'
    ),
    # What an answer has
    "prompt_logprobs": _NONE,
    "return_token_ids": _only(False, instead=_TOKEN_IDS),
    "return_tokens_as_token_ids": _only(False, instead=_TOKEN_IDS),
    "skip_special_tokens": _only(True, instead=_TOKEN_IDS),
    "spaces_between_special_tokens": _ANY,  # of those that are skipped
    # How it is served
    "cache_prompt": _ANY,
    "cache_salt": _NONE,
    "priority": _only(0),
    "request_id": _only(instead="send the header X-Request-Id"),
    "truncate_prompt_tokens": _NONE,
}

COMPLETION: Mapping[str, Unserved] = {
    **REQUEST,
    "add_special_tokens": _only(True, instead="give a list of token ids"),
    "suffix": _only(""),
}

CHAT: Mapping[str, Unserved] = {
    **REQUEST,
    "add_special_tokens": _only(False),
    "audio": _NONE,
    "chat_template": _only(instead="chat_template_kwargs are for the variables of the model's own"),
    "documents": _only([], instead="put them into a message"),
    "echo": _only(False),
    "include_reasoning": _only(True),
    "modalities": _only(["text"]),
    "moderation": _NONE,
    "prediction": _ANY,  # it makes answers faster, not other ones
    "verbosity": _only("medium"),
    "web_search_options": _NONE,
}

MESSAGE: Mapping[str, Unserved] = {
    "audio": _NONE,
    "function_call": _NONE,
    "tool_call_id": _NONE,
    "tool_calls": _only([]),
}
"""Of a message; what else a message has, such as an ``id``, changes nothing."""

IMAGE_URL: Mapping[str, Unserved] = {
    "detail": _only("auto", instead="the processor of the model chooses the resolution"),
}

STREAM_OPTIONS: Mapping[str, Unserved] = {"include_obfuscation": _ANY}
