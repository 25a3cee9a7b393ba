"""Tiny random vision-language models of any class of transformers, and images that they take.

A model is that of `any_model` with image tokens within its vocabulary and images of few patches.
What its forward is given for an image differs from class to class: several forms are tried, and the
model says how many tokens an image takes.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
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

# A tower of timm, where it is installed: four tokens of an image.
_TIMM = {"architecture": "test_resnet", "hidden_size": 96, "image_size": 64}
# Of four numbers of a wave one token; without noise, which is drawn anew in every forward.
_WAVES = {
    "num_filters": 4,
    "downsampling_ratios": [2, 2],
    "depths": [1, 1, 1],
    "vae_std": 0.0,
}
_SOUND = {"max_source_positions": 16, "num_mel_bins": 8}
_CODES = 8  # of an image of a model that quantises it
_MOST_TOKENS = 20  # that are tried where a model does not say how many an image takes

_OF_CLASSES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 4}},
    "chameleon": {
        "vocabulary_map": {
            "<image>": IMAGE,
            **{f"IMGIMG{'ABCDEFGH'[code]}Z": 40 + code for code in range(_CODES)},
        },
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_embeddings": _CODES,
            "resolution": 8,
        },
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": IMAGE,
            "<|extra_200|>": 39,
            **{f"<|visual token {code:06d}|>": 40 + code for code in range(_CODES)},
        },
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "codebook_size": _CODES,
        },
    },
    "blip-2": {"num_query_tokens": 4},
    "dots3_note": {
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "spatial_merge_size": 2,
            "mlp_layer_types": ["dense"],
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {
                "image_size": 64,
                "output_channels": 16,
                "downsample_channels": [16, 32],
                "global_attn_indexes": [0],
                "initializer_range": 0.4,
            }
        }
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e5,
                "mrope_section": [1, 1, 2],
            }
        }
    },
    "fast_vlm": {"vision_config": {"do_pooling": False, **_TIMM}},
    "florence2": {
        "vision_config": {
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "patch_prenorm": [False, True],
            "depths": [1, 1],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "window_size": 2,
        }
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": {"vision_config": _TIMM, "vision_soft_tokens_per_image": 4},
    "got_ocr2": {"vision_config": {"initializer_range": 0.4}},
    "granite_docling": {"vision_config": {"image_size": 16}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64, "num_attention_heads": 2},
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[8, 8], [8, 16]],
    },
    "granite_speech": {"projector_config": {"encoder_hidden_size": 32}},
    "granite_speech_plus": {"projector_config": {"encoder_hidden_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "kyutai_speech_to_text": {
        "codec_config": {"upsample_groups": 32},
        "audio_pad_token_id": 2,
        "audio_bos_token_id": 1,
        "codebook_vocab_size": 8,
        "num_codebooks": 2,
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 64},
        "text_config": {"cross_attention_layers": [1]},
    },
    "molmo2": {"video_token_id": IMAGE, "vision_config": {"image_size": [8, 8]}},
    "moss_transcribe_diarize": {"audio_config": _SOUND},
    "muse_spark": {
        "audio_config": {
            "num_hidden_layers": 1,
            "patch_sizes": [16],
            "hidden_sizes": [32],
            "depths": [1],
            "out_hidden_size": 32,
        },
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "qwen3_asr": {"audio_config": {"output_dim": 32}},
    "nemo_speechlm": {
        "word_timestamp_config": {"blank_token_id": VOCAB - 1},
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "vision_hidden_size": 32,
        "projector_hidden_size": 32,
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 8, "image_size": 8, "image_token_id": IMAGE},
        "audio_config": {"audio_token_id": AUDIO},
    },
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB - 4},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB - 4},
    "qwen3_omni_moe": {
        "talker_config": {
            "text_config": {"shared_expert_intermediate_size": 16},
            "spatial_merge_size": 2,
        }
    },
    "qwen2_audio": {"audio_config": _SOUND},
    "voxtral": {"audio_config": _SOUND},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2}},
    "internvl": {
        "vision_config": {"image_size": [8, 8], "patch_size": [4, 4]},
        "downsample_ratio": 0.5,
    },
    "llava_onevision": {"image_grid_pinpoints": [[8, 8], [8, 16]]},
    "llava_next": {"image_grid_pinpoints": [[8, 8], [8, 16]]},
    "llava_next_video": {"image_grid_pinpoints": [[8, 8], [8, 16]]},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "mistral3": {"text_config": {"sliding_window": None}},
    "perception_lm": {
        "vision_config": {
            "architecture": "test_vit",
            "model_args": {"embed_dim": 64, "img_size": 32},
            "image_size": 32,
            "do_pooling": False,
        }
    },
    "paligemma": {"vision_config": {"projection_dim": 32}, "projection_dim": 32},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _WAVES,
        "semantic_tokenizer_encoder_config": _WAVES,
        "acoustic_tokenizer_chunk_size": 64,
    },
    "vipllava": {"vision_feature_layers": [-1, -1]},
}


@attrs.frozen(eq=False)
class Image:
    """An image, as the forward of a model takes it.

    Attributes:
        num_tokens: Tokens that it takes in a prompt.
        arguments: Arguments of the forward; of several images they are joined along the first axis.
        types: The name by which the forward is told which tokens are of images, if it is.
        token: The token in whose place it is put; of sound it is another.
        packed: Arguments that are joined along the last axis.
    """

    num_tokens: int
    arguments: Mapping[str, Tensor]
    types: str | None = None
    token: int = IMAGE
    packed: tuple[str, ...] = ()

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        """A prompt with the image between tokens."""
        return [*before, *[self.token] * self.num_tokens, *after]


def tiny_seeing_model(class_name: str, **needs: Any) -> PreTrainedModel:
    """A tiny random model that takes images, or sound."""
    import transformers

    config_class = getattr(transformers, class_name).config_class
    kind = config_class.model_type
    default = config_class()
    known = {*vars(default), *config_class.attribute_map}
    given = dict(NEEDS.get(kind, {})) | {name: one for name, one in _IDS.items() if name in known}
    own = dict(_OF_CLASSES.get(kind, {}))
    for name, part_class in config_class.sub_configs.items():
        part = getattr(default, name, None)
        sees = "vision" in name or "image" in name
        if part is None and sees and name in own:  # there is none by default
            part = part_class()
        if isinstance(part, PretrainedConfig) and (sees or name in own):
            sizes = (
                {one: size for one, size in _VISION.items() if one in vars(part)} if sees else {}
            )
            given[name] = {**given.get(name, {}), **sizes, **own.pop(name, {})}
            if getattr(default, name) is None:
                given[name] = tiny_config(type(part), given[name], seeing=True)
    config = tiny_config(config_class, given | own | needs)
    model = tiny_random_model(class_name, config)
    for name, weight in model.named_parameters():
        if name.endswith(
            ("_attn_gate", "_mlp_gate", ".gate_attention", ".gate_ffw")
        ):  # they let nothing of an image through
            weight.data.fill_(1.0)
    return model


def image_of(model: PreTrainedModel, seed: int = 0) -> Image | None:
    """A random image or sound that a model takes; ``None`` if none was found."""
    known = inspect.signature(type(model).forward).parameters
    types = next((one for one in ("mm_token_type_ids", "token_type_ids") if one in known), None)
    for arguments in _forms(model, torch.Generator().manual_seed(seed)):
        if not set(arguments) <= set(known):
            continue
        token = AUDIO if any(name.startswith(("input_", "audio_")) for name in arguments) else IMAGE
        packed = ("pixel_values",) if "target_sizes" in arguments else ()
        for count in _counts(model, arguments):
            image = Image(count, arguments, types, token, packed)
            other = _changed(arguments)
            ids = torch.tensor([image.prompt([5, 9], [11])])
            try:
                with torch.no_grad():
                    found, changed = (
                        model(input_ids=ids, **of_images([one], ids)).logits
                        for one in (image, attrs.evolve(image, arguments=other))
                    )
            except Exception:
                continue
            if not torch.equal(found, changed):
                return image
    return None


def _changed(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other numbers, of which the forward is to give other logits."""
    found = {name: -one if one.is_floating_point() else one for name, one in arguments.items()}
    is_text = not any(one.is_floating_point() for one in arguments.values())
    return {name: one.flip(-1) for name, one in found.items()} if is_text else found


def of_images(images: list[Image], ids: Tensor) -> dict[str, Tensor]:
    """Arguments of a forward for all images of a batch, in the order of its rows."""
    if not images:
        return {}
    first = images[0]
    joined = {
        name: torch.cat([one.arguments[name] for one in images], dim=-(name in first.packed))
        for name in first.arguments
    }
    return joined if first.types is None else {**joined, first.types: (ids == first.token).long()}


def _forms(model: PreTrainedModel, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """What forwards of models are given for one image, or for one sound."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=rng)

    vision = getattr(model.config, "vision_config", None)
    vision = getattr(vision, "sam_config", vision)
    patch, size = getattr(vision, "patch_size", 4), getattr(vision, "image_size", 8)
    patch, size = (one[0] if isinstance(one, (list, tuple)) else one for one in (patch, size))
    patch, size = patch or 4, size or 8
    pixels, sizes = random(1, 3, size, size), torch.tensor([[size, size]])
    # Patches, a row each
    frames = getattr(vision, "temporal_patch_size", 1) or 1
    grid = torch.tensor([[1, 4, 4]])
    for width in dict.fromkeys((frames, 1, 2)):
        flat = random(16, 3 * width * patch * patch)
        yield {"pixel_values": flat, "image_grid_thw": grid}
        yield {"pixel_values": flat, "image_grid_thw": grid, "image_merge_sizes": torch.tensor([2])}
    yield {"pixel_values": random(16, 3, patch, patch), "image_grid_thw": grid}
    flat, places = (
        random(1, 16, 3 * patch * patch),
        torch.tensor([[x, y] for y in range(4) for x in range(4)]),
    )
    yield {
        "pixel_values": flat,
        "spatial_shapes": grid[:, 1:],
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }
    yield {"pixel_values": flat, "image_position_ids": places[None]}
    yield {
        "pixel_values": random(1, 3, patch, 16 * patch),
        "target_sizes": grid[:, 1:].int(),
    }
    yield {"pixel_values": flat[0], "image_grid_hw": grid[:, 1:]}
    yield {
        "pixel_values": flat,
        "image_token_pooling": torch.arange(16).view(4, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
    }
    # Whole images
    yield {
        "image_pixel_values": random(1, 2, 3, size, size),
        "image_sizes": sizes,
        "image_attention_mask": torch.ones(1, 2, size // patch, size // patch, dtype=torch.long),
    }
    yield {"pixel_values": pixels, "image_sizes": sizes}
    yield {"pixel_values": random(1, 3, 2 * size, 2 * size), "image_sizes": 2 * sizes}
    yield {"pixel_values": random(1, 2, 3, size, size), "image_sizes": sizes}
    yield {
        "pixel_values": random(1, 3, 3, size, size),
        "image_sizes": torch.tensor([[size, 2 * size]]),
    }
    yield {"pixel_values": pixels, "high_res_pixel_values": random(1, 3, size, size)}
    yield {"pixel_values": pixels}
    whole = torch.ones(1, 1, size, size, dtype=torch.bool)
    yield {"pixel_values": pixels[:, None], "pixel_attention_mask": whole}
    yield {"pixel_values": pixels[:, None], "pixel_attention_mask": whole[:, :, 0, 0]}
    yield {"pixel_values": pixels[:, None]}
    yield {
        "pixel_values": random(1, 4, 3 * (getattr(model.config, "patch_size", None) or patch) ** 2)
    }
    yield {
        "pixel_values": random(1, 1, 4, 3, size, size),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
    }
    # Sound
    audio = getattr(model.config, "audio_config", None) or getattr(
        model.config, "encoder_config", None
    )
    of_mels = getattr(audio, "asr_config", audio)
    mels = getattr(of_mels, "num_mel_bins", None) or getattr(audio, "input_dim", None) or 80
    longest = 2 * (getattr(audio, "max_source_positions", None) or 16)
    for length in dict.fromkeys((longest, 32, 100, 3000)):
        heard, all_of_it = random(1, mels, length), torch.ones(1, length, dtype=torch.long)
        yield {
            "input_features": heard,
            "input_features_mask": all_of_it,
            "padding_mask": all_of_it,
        }
        yield {"input_features": heard, "input_features_mask": all_of_it}
        yield {"input_features": heard, "feature_attention_mask": all_of_it}
        yield {"input_features": heard}
        yield {"input_features": heard.mT.contiguous()}

    stacked = mels * (getattr(audio, "num_stacked_frames", None) or 1)
    all_of_it = torch.ones(1, 8, dtype=torch.long)
    yield {"input_features": random(1, 8, stacked), "input_features_mask": all_of_it}
    yield {"input_values": random(1, 1, 32), "padding_mask": torch.ones(1, 32, dtype=torch.bool)}
    # A protein
    yield {
        "protein_input_ids": torch.randint(4, 20, (1, 8), generator=rng),
        "protein_attention_mask": all_of_it,
    }


def _counts(model: PreTrainedModel, arguments: Mapping[str, Tensor]) -> Sequence[int]:
    """How many tokens an image may take, by what the model says of it."""
    kind = "image" if any("pixel" in name for name in arguments) else "audio"
    owners = (model, getattr(model, "model", None))
    asked = [getattr(one, f"get_{kind}_features", None) for one in owners]
    features = next(filter(None, asked), None)
    if features is None:
        return range(1, _MOST_TOKENS)
    try:
        with torch.no_grad():
            found = features(**arguments)
    except Exception:
        return ()
    count = _count(found, model.config.get_text_config(decoder=True).hidden_size)
    return (count,) if count else range(1, _MOST_TOKENS)


def _count(features: Any, size: int) -> int:
    """Rows of embeddings of tokens."""
    found = getattr(features, "pooler_output", features)
    found = getattr(features, "last_hidden_state", None) if found is None else found
    listed = found if isinstance(found, (list, tuple)) else [found]
    return sum(one.numel() // size for one in listed if isinstance(one, Tensor))
