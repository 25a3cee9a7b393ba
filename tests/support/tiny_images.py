"""Tiny random vision-language models of any class of transformers, and images that they take.

A model is that of `any_model` with image tokens within its vocabulary and images of few patches.
What its forward is given for an image differs from class to class: several forms are tried, and the
model says how many tokens an image takes.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from any_model import NEEDS, VOCAB, tiny_config, tiny_random_model
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

IMAGE, VIDEO, AUDIO = VOCAB - 1, VOCAB - 2, VOCAB - 3

_IDS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "audio_token_id": AUDIO,
    "audio_token_index": AUDIO,
    "vision_start_token_id": VOCAB - 4,
    "vision_end_token_id": VOCAB - 5,
}

# Of the part that sees; those that a configuration knows.
_VISION = {
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "patch_size": 4,
    "image_size": 8,
    "window_size": 16,
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

_OF_CLASSES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "internvl": {
        "vision_config": {"image_size": [8, 8], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
    },
    "llava_next": {"image_grid_pinpoints": [[8, 8], [8, 16]]},
    "llava_next_video": {"image_grid_pinpoints": [[8, 8], [8, 16]]},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "mistral3": {"text_config": {"sliding_window": None}},
    "paligemma": {"vision_config": {"projection_dim": 32}, "projection_dim": 32},
}


@attrs.frozen(eq=False)
class Image:
    """An image, as the forward of a model takes it.

    Attributes:
        num_tokens: Tokens that it takes in a prompt.
        arguments: Arguments of the forward; of several images they are joined along the first axis.
        has_types: Whether the forward is told which tokens are of images, and by which name.
    """

    num_tokens: int
    arguments: Mapping[str, Tensor]
    types: str | None = None

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        """A prompt with the image between tokens."""
        return [*before, *[IMAGE] * self.num_tokens, *after]


def tiny_seeing_model(class_name: str, **needs: Any) -> PreTrainedModel:
    """A tiny random model that takes images."""
    import transformers

    config_class = getattr(transformers, class_name).config_class
    kind = config_class.model_type
    default = config_class()
    known = {*vars(default), *config_class.attribute_map}
    given = dict(NEEDS.get(kind, {})) | {name: one for name, one in _IDS.items() if name in known}
    own = dict(_OF_CLASSES.get(kind, {}))
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig) and ("vision" in name or "image" in name):
            sizes = {one: size for one, size in _VISION.items() if one in vars(part)}
            given[name] = {**given.get(name, {}), **sizes, **own.pop(name, {})}
    config = tiny_config(config_class, given | own | needs)
    return tiny_random_model(class_name, config)


def image_of(model: PreTrainedModel, seed: int = 0) -> Image | None:
    """A random image that a model takes; ``None`` if none was found."""
    known = inspect.signature(type(model).forward).parameters
    types = next((one for one in ("mm_token_type_ids", "token_type_ids") if one in known), None)
    for arguments in _forms(model, torch.Generator().manual_seed(seed)):
        if not set(arguments) <= set(known):
            continue
        try:
            with torch.no_grad():
                features = model.get_image_features(**arguments)
            size = model.config.get_text_config(decoder=True).hidden_size
            image = Image(_count(features, size), arguments, types)
            ids = torch.tensor([image.prompt([5, 9], [11])])
            with torch.no_grad():
                model(input_ids=ids, **of_images([image], ids))
        except Exception:
            continue
        return image
    return None


def of_images(images: list[Image], ids: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward for all images of a batch, in the order of its rows."""
    if not images:
        return {}
    joined = {
        name: torch.cat([image.arguments[name] for image in images]) for name in images[0].arguments
    }
    types = images[0].types
    return joined if types is None else {**joined, types: (ids == IMAGE).long()}


def _forms(model: PreTrainedModel, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
    vision = getattr(model.config, "vision_config", None)
    patch, size = getattr(vision, "patch_size", 4), getattr(vision, "image_size", 8)
    patch, size = (one[0] if isinstance(one, (list, tuple)) else one for one in (patch, size))
    patch, size = patch or 4, size or 8
    pixels = torch.randn(1, 3, size, size, generator=rng)
    sizes = torch.tensor([[size, size]])
    frames = getattr(vision, "temporal_patch_size", 1) or 1
    grid = torch.tensor([[1, 4, 4]])
    flat = torch.randn(16, 3 * frames * patch * patch, generator=rng)
    yield {"pixel_values": flat, "image_grid_thw": grid}
    yield {"pixel_values": pixels, "image_sizes": sizes}
    larger = torch.randn(1, 3, 2 * size, 2 * size, generator=rng)
    yield {"pixel_values": larger, "image_sizes": 2 * sizes}
    tiles = torch.randn(1, 3, 3, size, size, generator=rng)
    yield {"pixel_values": tiles, "image_sizes": torch.tensor([[size, 2 * size]])}
    yield {"pixel_values": pixels}
    whole = torch.ones(1, 1, size, size, dtype=torch.bool)
    yield {"pixel_values": pixels[:, None], "pixel_attention_mask": whole}
    yield {"pixel_values": pixels[:, None]}


def _count(features: Any, size: int) -> int:
    """Rows of embeddings of tokens."""
    found = getattr(features, "pooler_output", features)
    listed = found if isinstance(found, (list, tuple)) else [found]
    return sum(one.numel() // size for one in listed if isinstance(one, Tensor))
