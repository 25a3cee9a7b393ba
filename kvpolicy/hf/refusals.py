"""What a `PolicyCache` does not do for transformers, and says so."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import Cache

from kvpolicy.errors import CacheError

# What a forward may be given, besides what is empty: the cache sets most of it itself.
_KNOWN = {
    "attention_mask",
    "cache_position",  # of older releases of transformers
    "input_ids",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "return_dict",
    "tokenizer",  # for stop strings: generate hands it on to the model
    "use_cache",
}


def refuse(what: str) -> NoReturn:
    """Say what a cache cannot do."""
    msg = f"a PolicyCache {what}"
    raise CacheError(msg)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Make sure that a forward is one that a cache can serve.

    Raises:
        CacheError: If it is not.
    """
    if given.get("input_ids") is None:
        refuse("was given no input_ids; policies need token ids, not embeddings")
    if given.get("use_cache") is False:
        refuse("was given use_cache=False; leave it out")
    if isinstance(given.get("logits_to_keep"), torch.Tensor) or given.get("logits_to_keep", 0) > 1:
        refuse("gives the logits of the newest token only, and assisted decoding asks for more")
    if torch.is_grad_enabled():
        refuse("computes no gradients; call the model under torch.no_grad(), as generate does")
    unknown = [
        name
        for name, value in given.items()
        if name not in _KNOWN and value is not None and value is not False
    ]
    if unknown:
        refuse(f"was given {min(unknown)} for a forward, which it does not know; leave it out")


class NoOtherCache(Cache):
    """A cache that only its own model can write to, and that never goes back."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def _of_another_model(self, *_: Any, **__: Any) -> NoReturn:
        refuse("was given to a model that it was not made for; make one for each model")

    update = get_mask_sizes = get_query_offset = early_initialization = _of_another_model

    def reorder_cache(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: rows that one beam has evicted cannot be given to another."""
        refuse("does no beam search yet; leave out num_beams")

    def batch_repeat_interleave(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: slots are allocated once."""
        refuse("does no contrastive search yet, or whatever copies rows; use greedy or sampling")

    batch_select_indices = batch_repeat_interleave

    def crop(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: what was evicted for tokens that are taken back does not return."""
        refuse(
            "cannot take back tokens, as assisted decoding does; leave out assistant_model and "
            "prompt_lookup_num_tokens"
        )

    activate_past_recording = crop

    def __len__(self) -> int:
        return 0

    @property
    def is_compileable(self) -> bool:
        """Never: shapes change with the rows held."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Never."""
        return False
