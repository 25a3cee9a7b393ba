"""Small tokenizers of every kind whose decoding differs, made without files.

They know few words, so that most texts become letters, bytes, or what stands for unknown text.
"""

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

BEGIN, END, TURN = "<s>", "</s>", "<|turn|>"
SPECIAL = ("<unk>", BEGIN, END)
TOOL = "<tool>"  # an added token that is not special

LETTERS = "abcdefghilnoprstuvwx.,!?'0123é한국日本"
WORDS = ("the", "ing", "one", "two", "do", "n't", "'s", "ab")
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("a", "b")]
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _wrapped(tokenizer: Tokenizer, *, clean: bool = False) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token=BEGIN,
        eos_token=END,
        clean_up_tokenization_spaces=clean,
    )
    return _with_added(made)


def _with_added(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN]}, False)
    tokenizer.add_tokens([TOOL])
    return tokenizer


def _numbered(*words: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def byte_level(*, prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen: tokens of bytes; a letter may be several."""
    merges = [*_MERGES, ("Ġ", "the"), ("ð", "Ł"), ("í", "ķ"), ("ķ", "ľ")]
    alphabet = sorted(ByteLevel.alphabet())
    vocab = _numbered(*SPECIAL, *alphabet, *(a + b for a, b in merges))
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def _llama_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = [*_MERGES, ("▁", "the"), ("▁", "a"), ("▁", "▁")]
    pieces = ["▁", *LETTERS, *(a + b for a, b in merges)]
    return _numbered(*SPECIAL, *_BYTES, *pieces), merges


def llama(*, prefix_space: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2, Mistral: the class itself; a space before each text, unknown letters as bytes."""
    vocab, merges = _llama_vocab()
    return _with_added(LlamaTokenizer(vocab, merges, add_prefix_space=prefix_space))


def gemma() -> PreTrainedTokenizerFast:
    """Gemma: byte fallback, spaces replaced, none put in front."""
    vocab, merges = _llama_vocab()
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrapped(tokenizer)


def unigram(*, scheme: str = "always", clean: bool = False) -> PreTrainedTokenizerFast:
    """T5, XGLM: SentencePiece's other model, read by Metaspace; no bytes."""
    pieces = dict.fromkeys([*SPECIAL, "▁", *LETTERS, *WORDS, *(f"▁{word}" for word in WORDS)])
    tokenizer = Tokenizer(Unigram([(piece, -float(len(piece))) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _wrapped(tokenizer, clean=clean)


def word_piece(*, clean: bool = False) -> PreTrainedTokenizerFast:
    """BERT: words with spaces between, their parts with ``##``."""
    vocab = _numbered(*SPECIAL, *LETTERS, *WORDS, *(f"##{part}" for part in (*LETTERS, *WORDS)))
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=not clean)
    return _wrapped(tokenizer, clean=clean)


def suffixed() -> PreTrainedTokenizerFast:
    """GPT, CTRL, XLM: the last part of a word says so, and has its space after it."""
    merges = [("i", "n"), ("in", "g</w>"), ("t", "h"), ("th", "e</w>")]
    ends = [f"{letter}</w>" for letter in LETTERS]
    vocab = _numbered(*SPECIAL, *LETTERS, *ends, *(a + b for a, b in merges))
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return _wrapped(tokenizer)


def word_level(*, clean: bool = False) -> PreTrainedTokenizerFast:
    """One token for each word or letter, with spaces between or without a decoder's help."""
    tokenizer = Tokenizer(WordLevel(_numbered(*SPECIAL, *LETTERS, *WORDS), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    if not clean:
        tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, clean=clean)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level, space in front": lambda: byte_level(prefix_space=True),
    "Llama": llama,
    "Llama, no space in front": lambda: llama(prefix_space=False),
    "Gemma": gemma,
    "unigram": unigram,
    "unigram, no space in front": lambda: unigram(scheme="never"),
    "unigram, cleaned up": lambda: unigram(clean=True),
    "WordPiece": word_piece,
    "WordPiece, cleaned up": lambda: word_piece(clean=True),
    "BPE with suffixes": suffixed,
    "words": word_level,
    "words, cleaned up": lambda: word_level(clean=True),
}
