"""From the texts and messages of a body to the tokens of prompts.

Messages go through the chat template of the tokenizer, which transformers runs in a sandbox of
jinja. They are its data: a template in a message is text like any other, and so is a special token;
see `kvpolicy.model.chat`.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvpolicy.engine.requests.encoding import encode
from kvpolicy.errors import RequestError
from kvpolicy.model.chat import ChatEncoder, has_chat_template
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import ChatBody

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
        self._chat = ChatEncoder(self._tokenizer) if has_chat_template(tokenizer) else None

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
        return await self._run(lambda: [self._encode(one) for one in prompts])

    async def chat(self, body: ChatBody) -> tuple[int, ...]:
        """The tokens of a chat up to where its answer begins.

        Args:
            body: The messages, and what the template is given beside them.

        Raises:
            ApiError: The model has no chat template, or its template refuses them.
        """
        return await self._run(lambda: self._encode_chat(body))

    async def _run(self, make: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def _encode(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
        try:
            return encode(prompt, self._tokenizer, self._vocab_size)
        except RequestError as error:
            raise ApiError(400, str(error), param="prompt") from error

    def _encode_chat(self, body: ChatBody) -> tuple[int, ...]:
        if self._chat is None:
            message = (
                "the tokenizer of this model has no chat template; send a prompt to /v1/completions"
            )
            raise ApiError(400, message, param="messages", code="no_chat_template")
        plain = [
            one.model_dump(exclude_none=True) | {"role": _ROLES[one.role]} for one in body.messages
        ]
        variables = body.template_variables
        try:
            self._chat.check_variables(variables)
        except RequestError as error:
            given = (
                "reasoning_effort" if body.chat_template_kwargs is None else "chat_template_kwargs"
            )
            raise ApiError(400, str(error), param=given) from error
        try:
            chat = self._chat.render(
                plain,
                variables=variables,
                generation_prompt=body.add_generation_prompt is not False,
                continue_last=bool(body.continue_final_message),
            )
            self._check_length(len(chat.shown), "messages")
            return encode(self._chat.encode(chat), None, self._vocab_size)
        except RequestError as error:
            raise ApiError(400, str(error), param="messages") from error

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_length:
            message = (
                f"the prompt has {num_characters:,} characters, which are more than this server's "
                f"{self._max_tokens:,} tokens of a prompt can be"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
