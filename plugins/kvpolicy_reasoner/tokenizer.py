"""Tokenizers of the bundled reasoners: one token per word, number or punctuation mark.

Decoding reproduces the text exactly.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpolicy_reasoner.task import EOS, NAMES

PAD = "<|pad|>"
UNK = "<|unk|>"
NEWLINES = "\n\n"

_CONTROL = (PAD, EOS, UNK, "<|user|>", "<|assistant|>")
# Not special tokens: as in R1 models, `skip_special_tokens` does not remove them.
_THINK = ("<think>", "</think>")
_MARKS = (NEWLINES, "\\boxed{", "}", ".", ",", ":", "?", " =", " +", " -")
# As in R1's template, thoughts of earlier answers are left out.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{%- if message["role"] == "assistant" -%}
{{- "<|assistant|>" + message["content"].split("</think>")[-1] -}}
{%- else -%}
{{- "<|user|> " + message["content"].strip() -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|assistant|><think>\n\n" -}}
{%- endif -%}
"""
_OPENERS = ["First", "And", "Now", "Wait", "Alternatively", "Hmm", "Just", "Again", "So"]
_WORDS = [
    "What",
    "is",
    "needs",
    "so",
    "let",
    "me",
    "double-check",
    "redo",
    "it",
    "look",
    "back",
    "to",
    "be",
    "thorough",
    "go",
    "over",
    "again",
    "the",
    "answer",
]
_MAX_NUMBER = 30
# The leading space is part of the word, so that decoding is concatenation.
_PATTERN = r"\n\n|\\boxed\{| ?[A-Za-z]+(?:-[A-Za-z]+)?| ?[0-9]+| ?[=+\-]|[.,:?}]"


def build_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the task's word list.

    Args:
        extra: Tokens of another task; their ids follow those of this task.

    Returns:
        A tokenizer that pads on the left and adds no special tokens.
    """
    vocabulary = {token: index for index, token in enumerate((*_tokens(), *extra))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in _CONTROL])
    # AutoTokenizer assumes Qwen's byte-level BPE for every Qwen2 model and replaces the splitting
    # rules. Added tokens are matched before these rules, so adding all tokens makes the result
    # independent of the class that loads the tokenizer.
    words = [token for token in vocabulary if token not in _CONTROL]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _tokens() -> list[str]:
    numbers = [str(n) for n in range(_MAX_NUMBER + 1)]
    words = [f" {word}" for word in (*_WORDS, *NAMES, *numbers)]
    return [*_CONTROL, *_THINK, *_MARKS, *_OPENERS, *words, *numbers]


_VERBOSE_OPENERS = ["OK", "Next", "Then", "Let", "Yes"]
_VERBOSE_WORDS = [
    "list",
    "short",
    "fair",
    "long",
    "quick",
    "careful",
    "on",
    "and",
    "order",
    "from",
    "find",
    "take",
    "that",
    "that's",
    "not",
    "right",
    "correct",
    "verify",
    "make",
    "sure",
    "hold",
    "think",
    "once",
    "another",
    "way",
    "all",
    "steps",
    "should",
]


def build_verbose_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer from the word lists of both tasks.

    Returns:
        A tokenizer that pads on the left and adds no special tokens.
    """
    return build_tokenizer([*_VERBOSE_OPENERS, *(f" {word}" for word in _VERBOSE_WORDS)])
