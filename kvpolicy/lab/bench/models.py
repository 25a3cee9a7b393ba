"""Models for benchmarks: shapes with random weights, as fast as trained models, and real ones."""

import attrs
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from kvpolicy.errors import ModelError, error_summary
from kvpolicy.model.loading import as_dtype, load_model, move


@attrs.frozen
class Shape:
    """Sizes of a decoder of the Llama family.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Size of the hidden state.
        intermediate_size: Size inside the gated MLP.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Size of one head.
        vocab_size: Size of the vocabulary.
        tied: Whether head and embedding share one matrix.
        words: Short description.
        family: A key of `CONFIGS`; Qwen3 normalises queries and keys.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    words: str
    family: str = "llama"


CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}

SHAPES = {
    "tiny": Shape(2, 64, 160, 4, 2, 32, 512, True, "to try the command"),
    "host": Shape(
        36, 64, 128, 4, 2, 16, 512, True, "36 tiny layers: the time of the host", family="qwen3"
    ),
    "5m": Shape(4, 256, 768, 4, 2, 64, 4096, True, "for long texts in little time"),
    "30m": Shape(8, 512, 1664, 8, 2, 64, 8192, True, "2 KV heads: a small cache"),
    "100m": Shape(12, 768, 2048, 12, 4, 64, 32000, True, "three query heads to a KV head"),
    "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, True, "30 thin layers and a large head"),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False, "that of Llama-3.1-8B"),
    "qwen3-8b": Shape(
        36, 4096, 12288, 32, 8, 128, 151936, False, "that of Qwen3-8B", family="qwen3"
    ),
}


def random_model(
    shape: Shape, seed: int, *, max_positions: int, dtype: str = "float32", device: str = "cpu"
) -> PreTrainedModel:
    """Build a model without an end-of-sequence token.

    Args:
        shape: Sizes of the model.
        seed: Random seed for the weights; the global random state does not change.
        max_positions: Maximum length of a sequence.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Device; the model is created there and needs no host memory.

    Returns:
        The model.

    Raises:
        ModelError: The dtype or device does not exist.
    """
    torch_dtype = as_dtype(dtype)
    if not isinstance(torch_dtype, torch.dtype):
        msg = f"a model with random weights needs a dtype, not '{dtype}'; give for example float32"
        raise ModelError(msg)
    config = CONFIGS[shape.family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype).eval()
    except (RuntimeError, AssertionError) as error:
        msg = f"the model cannot be built on device '{device}': {error_summary(error)}"
        raise ModelError(msg) from error
    model.set_attn_implementation("sdpa")
    assert model.generation_config is not None, "decoders have a generation config"
    model.generation_config.eos_token_id = None
    return move(model, device)


def named_model(
    name: str, *, positions: int, dtype: str = "float32", device: str = "cpu"
) -> PreTrainedModel:
    """Load a real model, whose texts do not end.

    Args:
        name: What `kvpolicy.load_model` takes.
        positions: The longest sequence that it is to have.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: Device.

    Raises:
        ModelError: It cannot be loaded, has fewer positions, or keys and values of another form.
    """
    model, _ = load_model(name, dtype=dtype, device=device)
    config = model.config
    if getattr(config, "num_key_value_heads", None) is None:
        msg = (
            f"bench computes with KV heads, of which the configuration of '{name}' says nothing; "
            "give a model of the Llama or Qwen families"
        )
        raise ModelError(msg)
    if getattr(config, "head_dim", None) is None:  # it is implied
        config.head_dim = config.hidden_size // config.num_attention_heads
    if positions > (most := config.max_position_embeddings):
        msg = (
            f"model '{name}' has {most:,} positions, and {positions:,} are needed; give smaller "
            "--lengths, or a --shape"
        )
        raise ModelError(msg)
    assert model.generation_config is not None, "decoders have a generation config"
    model.generation_config.eos_token_id = None
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step has to read.

    An embedding that is not tied to the head does not count: a step reads one row per token.
    """
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    read = {id(one): one.nbytes for one in model.parameters()}
    if head is None or head.weight is not embedding:
        read.pop(id(embedding), None)
    return sum(read.values())


def kv_row_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values of one token of one sequence in all layers."""
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return int(numbers * model.dtype.itemsize)


def shape_named(name: str) -> Shape:
    """The entry of `SHAPES`; raises `ModelError` for another name."""
    if name not in SHAPES:
        msg = f"there is no shape '{name}'; choose one of {', '.join(SHAPES)}"
        raise ModelError(msg)
    return SHAPES[name]
