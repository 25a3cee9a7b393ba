"""The bundled reasoners: two small models, an adapter, their tasks, vectors, plans and presets."""

from pathlib import Path

REASONER = "reasoner"
REASONER_VERBOSE = "reasoner-verbose"
SMOLLM2_REASONER = "smollm2-reasoner"

DEFAULT_MODEL = REASONER
DEFAULT_PLAN = "reasoner-mix"  # under which the default model is served
DEFAULT_TASK = REASONER
DEFAULT_SWEEP = "baselines"

# Each with problems, a task, a training recipe, and weights: the last as an adapter of SmolLM2.
REASONERS = (REASONER, REASONER_VERBOSE, SMOLLM2_REASONER)


def bundled_path(name: str = REASONER) -> Path:
    """Return the Hugging Face folder of a trained reasoner, or that of its adapter.

    Args:
        name: One of `REASONERS`.
    """
    return Path(__file__).parent / "weights" / name
