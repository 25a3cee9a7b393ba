r"""Log-probabilities in the forms of OpenAI's interface.

Tokens that are a part of a character have no text. Completions write ``bytes:\xf0\x9f`` for them,
chats ``\xf0\x9f``, as OpenAI's servers do.
"""

from collections.abc import Sequence
from typing import Any

from kvpolicy.engine.requests.detokenize import TextDecoder
from kvpolicy.engine.requests.results import TokenLogprobs
from kvpolicy.serve.plans import ServedModel

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class CompletionLogprobs:
    """The ``logprobs`` of one choice of a completion, for its tokens as they come."""

    def __init__(self, model: ServedModel) -> None:
        """Begin with the first token.

        Args:
            model: The model that answers.
        """
        self._model = model
        self._text = TextDecoder(model.tokenizer)
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprobs], first: int | None = None) -> dict[str, Any]:
        """What an answer has for the next tokens.

        ``top_logprobs`` has a text once: of several tokens with equal texts, the likeliest. The
        token that was taken is in it, too. ``text_offset`` is where the character begins that a
        token is a part of.

        Args:
            logprobs: Those of the tokens.
            first: A token before them that begins a prompt, and has none.
        """
        begin = [] if first is None else [first]
        unknown = [None for _ in begin]
        tokens = [*begin, *(one.token for one in logprobs)]
        return {
            "tokens": [self._shown(token) for token in tokens],
            "token_logprobs": [*unknown, *(_finite(one.logprob) for one in logprobs)],
            "top_logprobs": [*unknown, *(self._top(one) for one in logprobs)],
            "text_offset": [self._offset_of(token) for token in tokens],
        }

    def _shown(self, token: int) -> str:
        return _shown(self._model.token_bytes(token), "bytes:")

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):  # likeliest first
            found.setdefault(self._shown(token), _finite(logprob))
        return found

    def _offset_of(self, token: int) -> int:
        offset = self._offset
        self._text.add(token)
        # A run of bytes that is not complete may have fewer characters than before.
        self._offset = max(self._text.num_complete, offset)
        return offset


def chat_logprobs(model: ServedModel, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` of a choice of a chat, of some of its tokens.

    Args:
        model: The model that answers.
        logprobs: Those of the tokens.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = model.token_bytes(token)
        return {"token": _shown(content), "logprob": _finite(logprob), "bytes": list(content)}

    content = [
        {
            **entry(one.token, one.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in one.top],
        }
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _shown(content: bytes, mark: str = "") -> str:
    """Bytes as text; as escapes if they are a part of a character."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in content)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
