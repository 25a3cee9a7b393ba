"""The second reasoner's tokenizer: the first one's tokens in their order, and new words."""

from transformers import PreTrainedTokenizerFast

from kvpolicy_reasoner.tokenizer import build_tokenizer

_OPENERS = ["OK", "Next", "Then", "Let", "Yes"]
_WORDS = [
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
        A tokenizer that pads on the left and adds no tokens of its own.
    """
    return build_tokenizer([*_OPENERS, *(f" {word}" for word in _WORDS)])
