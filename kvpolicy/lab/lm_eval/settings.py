"""How a task of the harness wants a text to be generated, in the engine's terms."""

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from kvpolicy.engine.request import Sampling
from kvpolicy.errors import KVPolicyError, TaskError

# Tokens of a generation where the task does not say: the harness's own number.
USUAL_LENGTH = 256

_NOT_DRAWN = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}


@attrs.frozen
class Settings:
    """How a text is generated.

    Attributes:
        max_new_tokens: The most tokens to generate.
        sampling: How tokens are drawn; its seed is 0.
        until: Texts that end it and are cut off.
    """

    max_new_tokens: int
    sampling: Sampling
    until: tuple[str, ...]

    def sampling_with(self, seed: int) -> Sampling:
        """How tokens are drawn, with a seed."""
        return attrs.evolve(self.sampling, seed=seed)


def read_settings(generation: Mapping[str, Any], task: str) -> Settings:
    """Read what the harness calls ``generation_kwargs``.

    Args:
        generation: ``until``, ``max_gen_toks`` and its other names, ``do_sample``,
            ``temperature``, ``top_p``, ``top_k``.
        task: Name of the task, for messages.

    Raises:
        TaskError: A setting has a value that cannot be, or the engine does not know it.
    """
    try:
        known = dict(normalize_gen_kwargs(dict(generation), USUAL_LENGTH))
        until = handle_stop_sequences(known.pop("until"), eos=None)
        draws = known.pop("do_sample")
        # What transformers' generate() takes if a task samples and does not say how.
        temperature = float(known.pop("temperature", 1.0)) if draws else 0.0
        known.pop("temperature", None)
        sampling = Sampling(temperature, known.pop("top_k", 0) or 0, known.pop("top_p", 1.0))
        settings = Settings(
            known.pop("max_gen_toks"), sampling, tuple(str(text) for text in until if text)
        )
    except (KVPolicyError, TypeError, ValueError) as error:
        msg = f"task '{task}' asks for a generation that cannot be: {error}"
        raise TaskError(msg) from error
    for key, value in known.items():
        if value != _NOT_DRAWN.get(key):
            msg = (
                f"task '{task}' asks for a generation with {key}={value!r}, which the engine "
                "does not have; take it out of the task's generation_kwargs"
            )
            raise TaskError(msg)
    return settings


def seed_of(seed: int, *which: object) -> int:
    """Seed of one request: two attempts at a question are drawn apart.

    Args:
        seed: Seed of the run.
        which: What tells the request from all others.
    """
    text = f"{seed} {which}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
