"""The bundled reasoners: two small reasoning models with tasks, vectors, plans and presets."""

from pathlib import Path

REASONER = "reasoner"
REASONER_VERBOSE = "reasoner-verbose"
SMOLLM2_REASONER = "smollm2-reasoner"

DEFAULT_MODEL = REASONER
DEFAULT_PLAN = "reasoner-mix"  # under which the default model is served
DEFAULT_TASK = REASONER
DEFAULT_SWEEP = "baselines"

BUNDLED = (REASONER, REASONER_VERBOSE)
# With problems, a task and a training recipe; not all have weights here.
REASONERS = (*BUNDLED, SMOLLM2_REASONER)


def bundled_path(name: str = REASONER) -> Path:
    """Return the Hugging Face folder of a trained reasoner.

    Args:
        name: One of `BUNDLED`.
    """
    return Path(__file__).parent / "weights" / name
