"""A tiny LLaVA with its processor, as a folder of the hub has them, and images for it."""

import base64
import io
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tiny import tiny_tokenizer
from tiny_images import IMAGE, tiny_seeing_model
from transformers import LlavaProcessor, PreTrainedModel

MARK = f"<{IMAGE}>"
SIZE = 8  # pixels of an image as the model sees it
NUM_TOKENS = 4  # of an image

# Reads parts alone, as templates for images do.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + MARK + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def tiny_seeing() -> tuple[PreTrainedModel, Any]:
    """A model and its processor."""
    model = tiny_seeing_model("LlavaForConditionalGeneration").double()
    # A text in which the model has generated the token of an image cannot be given to it again.
    model.generation_config.suppress_tokens = [IMAGE]
    return model, tiny_processor()


def tiny_processor() -> LlavaProcessor:
    """The processor of the model; transformers needs torchvision for another one."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    name = "CLIPImageProcessorPil"
    of_images = getattr(transformers, name, None) or transformers.CLIPImageProcessor
    size = {"height": SIZE, "width": SIZE}
    return LlavaProcessor(
        of_images(size=size, crop_size=size),
        tokenizer,
        patch_size=SIZE // 2,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARK,
        chat_template=TEMPLATE,
    )


def picture(seed: int, width: int = 12, height: int = 9) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def url_of(image: Image.Image, kind: str = "png", **options: Any) -> str:
    """An image as a client sends it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
