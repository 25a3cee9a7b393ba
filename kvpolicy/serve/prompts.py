"""From the texts and messages of a body to the tokens of prompts.

Messages go through the chat template of the tokenizer, which transformers runs in a sandbox of
jinja. They are its data: a template in a message is text like any other. A special token in a
message is not: it could end the message early, so it is refused.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvpolicy.engine.requests.sequence import encode
from kvpolicy.errors import RequestError, error_summary
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import Message

# Templates know system, user and assistant; OpenAI has renamed the first one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_Made = TypeVar("_Made")


class PromptEncoder:
    """Encodes prompts in a thread of its own, so that a long one holds up no stream."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_tokens: int) -> None:
        """Start the thread.

        Args:
            tokenizer: The tokenizer of the model.
            vocab_size: Token ids are below this.
            max_tokens: The longest prompt of any plan. A text that is certainly longer is refused
                before it is encoded, which takes seconds for some megabytes.
        """
        # Its own tokenizer: the engine's is used by the thread of its steps.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_length = max_tokens * max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "kvpolicy-encode")
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # What stands for unknown text ends nothing, and may be a word.
        special = {token.content for token in added if token.special}
        self._special = sorted(special - {getattr(tokenizer, "unk_token", None)})

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, prompts: Sequence[str | list[int]]) -> list[tuple[int, ...]]:
        """The tokens of prompts.

        Args:
            prompts: Texts or token ids.

        Raises:
            ApiError: One of them is no valid prompt.
        """
        return await self._run(lambda: [self._encode(one, "prompt") for one in prompts])

    async def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a chat up to where the next answer begins.

        Args:
            messages: The messages.

        Raises:
            ApiError: The model has no chat template, or its template refuses the messages.
        """
        return await self._run(lambda: self._encode(self._chat_text(messages), "messages"))

    async def _run(self, make: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def _encode(self, prompt: str | list[int], param: str) -> tuple[int, ...]:
        if isinstance(prompt, str) and len(prompt) > self._max_length:
            message = (
                f"the prompt has {len(prompt):,} characters, which are more than this server's "
                f"{self._max_tokens:,} tokens of a prompt can be"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        try:
            if param == "messages":  # the template has written the special tokens
                ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
                return encode(ids, None, self._vocab_size)
            return encode(prompt, self._tokenizer, self._vocab_size)
        except RequestError as error:
            raise ApiError(400, str(error), param=param) from error

    def _chat_text(self, messages: Sequence[Message]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            message = (
                "the tokenizer of this model has no chat template; send a prompt to /v1/completions"
            )
            raise ApiError(400, message, param="messages", code="no_chat_template")
        for number, one in enumerate(messages):
            found = next((token for token in self._special if token in one.content), None)
            if found is not None:
                param = f"messages[{number}].content"
                message = f"{param} holds '{found}', a special token of this model; leave it out"
                raise ApiError(400, message, param=param)
        plain = [one.model_dump(exclude_none=True) | {"role": _ROLES[one.role]} for one in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    plain, add_generation_prompt=True, tokenize=False
                )
            )
        except Exception as error:  # templates are programs, and raise errors of their own
            message = (
                f"the chat template of this model refuses the messages: {error_summary(error)}"
            )
            raise ApiError(400, message, param="messages") from error
