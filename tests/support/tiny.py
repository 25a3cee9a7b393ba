"""Tiny models and tokenizers for tests, without downloads or files.

The weights are random and large, so that greedy tokens vary and depend on the whole prompt:
a model that repeats itself would hide most cache bugs.
"""

import copy
import re
from functools import lru_cache

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3")

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(
    family: str = "llama",
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    vocab: int = 61,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_changes: object,
) -> PreTrainedModel:
    """A random decoder model in eval mode. Equal arguments give equal weights."""
    config_class, model_class = _CLASSES[family]
    options: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 2 * num_heads * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = config_class(**(options | config_changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            # Normalised heads attend almost uniformly, so every prompt would get the same tokens.
            weight.data.mul_(3.0)
    return model.to(dtype).eval()


@lru_cache(maxsize=32)
def shared_model(
    family: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Like `tiny_model`, but cached: for tests that never change the weights."""
    return tiny_model(
        family, seed=seed, num_layers=num_layers, num_kv_heads=num_kv_heads, dtype=dtype
    )


def greedy_tokens(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Tokens of ``model.generate`` for one prompt: the reference without eviction."""
    # A copy, because generate() changes the options of the model.
    options = copy.deepcopy(model.generation_config)
    options.update(do_sample=False, max_new_tokens=max_new_tokens, use_cache=True)
    ids = torch.tensor([prompt])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return answer[0, len(prompt) :].tolist()


def tiny_tokenizer(vocab: int = 61) -> PreTrainedTokenizerFast:
    """One token per character: letters, digits, punctuation; further ids are ``<i>``."""
    characters = [*"abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?+-*/=()\n"]
    words = {character: i for i, character in enumerate(characters[:vocab])}
    words |= {f"<{i}>": i for i in range(len(words), vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="a", clean_up_tokenization_spaces=False
    )


def word_tokenizer(words: dict[str, int], unknown: str) -> PreTrainedTokenizerFast:
    """The given texts as tokens, matched longest first."""
    tokenizer = Tokenizer(WordLevel(words, unk_token=unknown))
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, 256 in total: non-ASCII characters take several tokens."""
    words = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Like R1 models: line breaks are Ċ and merge with punctuation; with think tags."""
    merges = [("Ċ", "Ċ"), (".", "Ċ"), (".", "ĊĊ"), ("ĊĊ", "Ċ"), ("Ġ", "a"), (")", ".ĊĊ")]
    words = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    for left, right in merges:
        words[left + right] = len(words)
    tokenizer = Tokenizer(BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


# As in the tokenizer_config.json of DeepSeek-R1's distilled models, for one user's turn.
R1_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)


def r1_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with R1's special tokens and chat template; texts start with its BOS token."""
    words = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    first, last = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tokenizer.add_special_tokens([first, last, "<｜User｜>", "<｜Assistant｜>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=last,
        chat_template=R1_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
