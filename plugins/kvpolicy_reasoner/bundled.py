"""The reasoners that come with the package: the names a user types, and where their weights lie."""

from pathlib import Path

REASONER = "reasoner"
REASONER_VERBOSE = "reasoner-verbose"

_FOLDERS = {REASONER: "weights", REASONER_VERBOSE: "verbose/weights"}

BUNDLED = tuple(_FOLDERS)


def bundled_path(name: str = REASONER) -> Path:
    """Return the Hugging Face folder of a trained reasoner that ships with the package.

    Args:
        name: One of `BUNDLED`.

    Returns:
        A folder for ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer``.
    """
    return Path(__file__).parent / _FOLDERS[name]
