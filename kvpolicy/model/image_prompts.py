"""From a chat with images to a prompt, by the processor that belongs to a model.

A chat template writes a mark for each image. The processor of the model puts in its place as many
tokens as the image takes, and makes the tensors that the model is given beside them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import ModelError, RequestError, error_summary
from kvpolicy.model.chat import ChatEncoder, RenderedChat
from kvpolicy.model.embedded import image_arguments
from kvpolicy.model.loading import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

READS_TEXT = "this model reads text alone"
"""Why a client may send no images to a model that takes none."""

NO_PROCESSOR = "the processor of this model cannot be loaded"
"""Why it may send none to one that does; the folder of the server is not the client's business."""

# What a processor returns of the tokens themselves.
_OF_TOKENS = ("input_ids", "attention_mask")


def processor_for(
    model: PreTrainedModel, name: str, *, trust_remote_code: bool = False
) -> tuple[Any, str]:
    """The processor of a model that takes images.

    Args:
        model: The model, loaded.
        name: What it was loaded by, see `load_model`.
        trust_remote_code: Whether to run code that comes with it.

    Returns:
        The processor, and an empty text; or ``None``, and for the operator what is wrong with it,
        of a model that takes images.
    """
    if not image_arguments(model):
        return None, ""
    try:
        return load_processor(name, trust_remote_code=trust_remote_code), ""
    except ModelError as error:
        return None, str(error)


def chat_template_of(processor: Any) -> str | None:
    """The chat template of a processor, if it has one; of several that called ``default``."""
    template = getattr(processor, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


class ImagePrompts:
    """Makes prompts of chats with images."""

    def __init__(self, processor: Any, chat: ChatEncoder) -> None:
        """Take what makes them.

        Args:
            processor: The processor of the model, with a tokenizer of its own.
            chat: Encodes messages by its template.
        """
        self._processor, self._chat = processor, chat

    def encode(
        self, chat: RenderedChat, images: Sequence["Image"]
    ) -> tuple[list[int], dict[str, Tensor]]:
        """The tokens of a chat, and what the model is given for its images.

        They are those of ``processor.apply_chat_template(..., tokenize=True)``.

        Args:
            chat: What the template makes of the messages.
            images: Their images, in order.

        Returns:
            Token ids, and tensors by the name of an argument of the model.

        Raises:
            RequestError: The messages or the images are refused, by the template or the processor.
        """
        if written := self._chat.control_texts(chat):
            msg = (
                f"text of a message has '{written[0]}', a special token of this model, which a "
                "processor does not read as text; leave it out of a chat with images"
            )
            raise RequestError(msg)
        self._chat.encode(chat)  # refuses texts that would form a special token
        mark = getattr(self._processor, "image_token", None)
        found = len(images) if mark is None else chat.shown.count(mark)
        if found != len(images):
            msg = (
                f"the messages have {len(images)} images, and the chat template of this model "
                f"writes '{mark}' {found} times for them; put images into messages of the user, "
                "and leave this mark out of texts"
            )
            raise RequestError(msg)
        given = self._processed(chat.shown, images)
        (ids,) = given["input_ids"].tolist()
        tensors = {name: one for name, one in given.items() if name not in _OF_TOKENS}
        wrong = [name for name, one in tensors.items() if not isinstance(one, Tensor)]
        if wrong:
            msg = (
                f"the processor of this model makes {wrong[0]} of these images, which is no "
                "tensor; send one image of an ordinary size"
            )
            raise RequestError(msg)
        return ids, tensors

    def _processed(self, text: str, images: Sequence["Image"]) -> dict[str, Any]:
        # As `apply_chat_template` of a processor: templates may or may not write the first token.
        first = self._processor.tokenizer.bos_token
        has_first = first is not None and text.startswith(first)
        options = {"add_special_tokens": False} if has_first else {}
        try:
            return dict(
                self._processor(text=text, images=[[*images]], return_tensors="pt", **options)
            )
        except Exception as error:  # images of sizes that it does not take, for example
            msg = f"the processor of this model refuses the images: {error_summary(error)}"
            raise RequestError(msg) from error
