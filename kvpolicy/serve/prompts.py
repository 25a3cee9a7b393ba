"""From the texts and messages of a body to prompts.

Messages go through the chat template of the tokenizer, which transformers runs in a sandbox of
jinja. They are its data: a template in a message is text like any other, and so is a special token;
see `kvpolicy.model.chat`. Images go through the model's processor.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
from torch import Tensor

from kvpolicy.engine.requests.encoding import encode
from kvpolicy.errors import RequestError
from kvpolicy.model.chat import ChatEncoder, has_chat_template
from kvpolicy.model.image_prompts import ImagePrompts
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import ChatBody, Message
from kvpolicy.serve.images import ImageReader
from kvpolicy.serve.plans import ServedModel

# Templates know system, user and assistant; OpenAI has renamed the first one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_Made = TypeVar("_Made")


@attrs.frozen(eq=False)
class Prompt:
    """A prompt as an engine takes it.

    Attributes:
        tokens: Its tokens, those of its images included.
        images: What the model is given for its images; see `Request.images`.
    """

    tokens: tuple[int, ...]
    images: Mapping[str, Tensor] | None = None


class PromptEncoder:
    """Encodes prompts in a thread of its own, so that a long one holds up no stream."""

    def __init__(self, model: ServedModel, max_tokens: int, max_pixels: int) -> None:
        """Start the thread.

        Args:
            model: The model.
            max_tokens: The longest prompt of any plan. A text that is certainly longer is refused
                before it is encoded, which takes seconds for some megabytes.
            max_pixels: The most pixels of the images of a chat, together.
        """
        tokenizer = model.tokenizer
        # Its own tokenizer: the engine's is used by the thread of its steps.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._vocab_size = model.plans[0].engine.adapter.vocab_size
        self._max_tokens = max_tokens
        self._max_length = max_tokens * max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "kvpolicy-encode")
        self._chat = ChatEncoder(self._tokenizer) if has_chat_template(tokenizer) else None
        self._max_pixels = max_pixels
        self._no_images = model.no_images
        self._images: ImagePrompts | None = None
        if model.processor is not None and self._chat is not None:
            self._images = ImagePrompts(model.processor, self._chat)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prompts(self, prompts: Sequence[str | list[int]]) -> list[Prompt]:
        """The prompts of a completion.

        Args:
            prompts: Texts or token ids.

        Raises:
            ApiError: One of them is no valid prompt.
        """
        return await self._run(lambda: [self._encode(one) for one in prompts])

    async def chat(self, body: ChatBody) -> Prompt:
        """A chat up to where its answer begins.

        Args:
            body: The messages, and what the template is given beside them.

        Raises:
            ApiError: The model has no chat template, or its template refuses them; an image is
                none, or the model takes none.
        """
        return await self._run(lambda: self._encode_chat(body))

    async def _run(self, make: Callable[[], _Made]) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def _encode(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
        try:
            return Prompt(encode(prompt, self._tokenizer, self._vocab_size))
        except RequestError as error:
            raise ApiError(400, str(error), param="prompt") from error

    def _encode_chat(self, body: ChatBody) -> Prompt:
        if self._chat is None:
            message = (
                "the tokenizer of this model has no chat template; send a prompt to /v1/completions"
            )
            raise ApiError(400, message, param="messages", code="no_chat_template")
        plain = [_plain(one) for one in body.messages]
        has_images = any(one.images for one in body.messages)
        if has_images and self._images is None:
            message = f"a message has an image, and this server takes none: {self._no_images}"
            raise ApiError(400, message, param="messages", code="images_not_supported")
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
            if self._images is None or not has_images:
                return Prompt(encode(self._chat.encode(chat), None, self._vocab_size))
            images = ImageReader(self._max_pixels).read(body.messages)
            tokens, tensors = self._images.encode(chat, images)
            return Prompt(encode(tokens, None, self._vocab_size), tensors)
        except RequestError as error:
            raise ApiError(400, str(error), param="messages") from error

    def _check_length(self, num_characters: int, param: str) -> None:
        if num_characters > self._max_length:
            message = (
                f"the prompt has {num_characters:,} characters, which are more than this server's "
                f"{self._max_tokens:,} tokens of a prompt can be"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def _plain(message: Message) -> dict[str, Any]:
    """A message as the template is given it."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]
    others = message.model_dump(exclude_none=True, exclude={"role", "content"})
    return {"role": _ROLES[message.role], "content": content, **others}
