"""Other libraries while they load a model: they print nothing, and each error is one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path

from kvpolicy.errors import ModelError, error_summary


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress progress bars, retries and advice of transformers and the hub's client."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    has_bars = logging.is_progress_bar_enabled()
    level, hub_level = logging.get_verbosity(), hub.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(ERROR)
    hub.set_verbosity(ERROR)
    try:
        yield
    finally:
        hub.set_verbosity(hub_level)
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def first_sentence(error: BaseException) -> str:
    """Another library's message as one sentence: its first line, or all if that ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    has_sentence = isinstance(error, (OSError, ValueError)) and lines
    line = lines[0] if has_sentence else error_summary(error)
    if line.endswith(":"):
        line = " ".join(lines)
    return line if line.endswith((".", "!", "?")) else f"{line}."


def cannot_load(name: str | Path, reason: str) -> ModelError:
    """The error for a model that is there and cannot be loaded.

    Args:
        name: What the user named.
        reason: One sentence with its full stop, and what to do.
    """
    return ModelError(f"model '{name}' cannot be loaded: {reason}")
