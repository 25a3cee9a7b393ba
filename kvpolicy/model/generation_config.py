"""What the generation config of a model does to its next tokens, as in ``model.generate``.

`generate` makes logits processors of it. So do we, by the model's own method and for one sequence
at a time: they look at the tokens of a sequence and count those of its prompt, which in a padded
batch are not its own. ``docs/reference/generation-config.md`` says what becomes of every field.
"""

import sys
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from kvpolicy.errors import ModelError, error_summary

# What chooses tokens in other ways than from the logits of one sequence, and what turns it off.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "dola_layers": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "watermarking_config": (),
}

# What cuts a distribution to draw from and is no column of `kvpolicy.attention.draw`.
_CUTS = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")

# What reads the prompt as if it were that of an encoder.
_READS_PROMPT = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")


class GenerationRules:
    """The generation config of a model as it is now, applied to single sequences.

    Attributes:
        stop_strings: Texts that end a generation whose request names none.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        """Read the config; the model is left as it is.

        Args:
            model: The model.
            vocab_size: Token ids are below this.

        Raises:
            ModelError: If it asks for what the engine does not do, or has a value that
                `generate` does not take.
        """
        self._model = model
        self._config = copy(getattr(model, "generation_config", None) or GenerationConfig())
        name = type(model).__name__
        for field, off in REFUSED.items():
            value = getattr(self._config, field, None)
            if value is not None and value not in off:
                msg = (
                    f"model {name} cannot be run: its generation config has "
                    f"{field}={value!r:.60}, which the engine does not do; set "
                    f"model.generation_config.{field} = None, or delete the line in "
                    "generation_config.json, or call generate with a PolicyCache"
                )
                raise ModelError(msg)
        stops = getattr(self._config, "stop_strings", None) or ()
        self.stop_strings = (stops,) if isinstance(stops, str) else tuple(stops)
        self._try_out(name, vocab_size)

    def processors(
        self, prompt: Sequence[int], given: Mapping[str, Any], device: torch.device
    ) -> tuple[LogitsProcessorList, bool]:
        """The logits processors of a sequence.

        Args:
            prompt: Tokens of its prompt.
            given: What its request says, by the names of a generation config: ``max_length``,
                ``eos_token_id`` (a list), and whatever else replaces the model's own.
            device: Device of the logits.

        Returns:
            The processors, and whether they also do all that temperature, top-k, top-p and min-p
            ask for, so that tokens are drawn from what they leave.
        """
        config = copy(self._config)
        for field, value in given.items():
            setattr(config, field, value)
        draws = bool(config.do_sample) and any(_is_set(config, field) for field in _CUTS)
        config.do_sample = draws
        return self._made(config, prompt, device), draws

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are drawn where a request does not say: temperature, top-k, top-p and min-p.

        What the config does not set is left out.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        found = {name: getattr(self._config, name, None) for name in names}
        if self._config.do_sample is False:
            found["temperature"] = 0.0
        if found["top_p"] == 0:  # to transformers, the likeliest token alone
            found["top_p"] = sys.float_info.min
        return {name: value for name, value in found.items() if value is not None}

    def _made(
        self, config: GenerationConfig, prompt: Sequence[int], device: torch.device
    ) -> LogitsProcessorList:
        """The processors that `generate` makes of a config, which is changed."""
        make = getattr(self._model, "_get_logits_processor", None)  # it has no public name
        if make is None:
            return LogitsProcessorList()
        if config.min_new_tokens is not None:  # as generate prepares it
            config.min_length = config.min_new_tokens + len(prompt)
        stops = config.eos_token_id
        config._eos_token_tensor = torch.tensor(stops, device=device) if stops else None
        if not stops:  # there is nothing to make likelier
            config.exponential_decay_length_penalty = None
        reads_prompt = any(_is_set(config, field) for field in _READS_PROMPT)
        made: LogitsProcessorList = make(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], device=device) if reads_prompt else None,
            device=device,
        )
        return made

    def _try_out(self, name: str, vocab_size: int) -> None:
        """Process logits once, so that values are refused now or not at all."""
        config, eos = copy(self._config), self._config.eos_token_id
        config.max_length, config.do_sample = 2, True
        config.temperature = config.temperature or None  # 0: a server takes the likeliest token
        config.eos_token_id = [eos] if isinstance(eos, int) else eos
        try:
            made = self._made(config, [0], torch.device("cpu"))
            tokens: Any = torch.zeros(1, 1, dtype=torch.int64)
            made(tokens, torch.zeros(1, vocab_size))
        except Exception as error:  # whatever classes of transformers may raise
            msg = (
                f"model {name} cannot be run: its generation config cannot be followed: "
                f"{error_summary(error)}; correct generation_config.json"
            )
            raise ModelError(msg) from error


def _is_set(config: GenerationConfig, field: str) -> bool:
    return getattr(config, field, None) is not None
