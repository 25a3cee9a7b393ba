"""The names of the bundled reasoners; weights are stored in bfloat16, and run in float32."""

from kvpolicy import InstalledModel
from kvpolicy_reasoner import REASONER_VERBOSE, SMOLLM2_REASONER, bundled_path

_LICENCE = "Apache-2.0"


def reasoner() -> InstalledModel:
    """The first reasoner."""
    title = "small model that solves chains of sums step by step"
    return InstalledModel(bundled_path(), "float32", title, _LICENCE)


def reasoner_verbose() -> InstalledModel:
    """The second reasoner."""
    title = "the same with longer thoughts, which repeat themselves"
    return InstalledModel(bundled_path(REASONER_VERBOSE), "float32", title, _LICENCE)


def smollm2_reasoner() -> InstalledModel:
    """The third: an adapter, which is added to the weights of SmolLM2 when it is loaded."""
    title = "SmolLM2 with an adapter that solves chains of sums"
    return InstalledModel(bundled_path(SMOLLM2_REASONER), "float32", title, _LICENCE)
