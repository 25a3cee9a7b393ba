"""The forwards of a few tokens that a model is tried with, so that it is refused before it runs."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.errors import ModelError
from kvpolicy.model.config import counts_positions
from kvpolicy.model.failures import explained
from kvpolicy.model.forward_input import ForwardInput

# Tokens of the longest sequence.
_NUM_TOKENS = 4


@attrs.frozen(eq=False)
class FirstForwards:
    """Tries one model, in all ways in which its tokens will be run.

    Attributes:
        model: The model.
        forward: Runs it over the new tokens of a step, see `ModelAdapter.forward`.
        new_cache: Makes a cache of so many slots that keep so many rows.
        token: A token of it.
    """

    model: PreTrainedModel
    forward: Callable[[ForwardInput], tuple[Tensor, Tensor | None]]
    new_cache: Callable[[int, int], KVCache]
    token: int

    def check(self, *, static: bool) -> KVCache:
        """Compare tokens beside others with tokens alone.

        The second of two tokens is prefilled beside a shorter prompt, and decoded after a padded
        one. Both ways give the same numbers.

        Args:
            static: Whether decode steps are static.

        Returns:
            The cache, which shows how the layers attend and how prompts are to be brought in.

        Raises:
            ModelError: If the engine cannot run the model.
        """
        try:
            cache, prefilled, decoded = self._run_both_ways(static=static)
            self._check_positions()
        except Exception as error:  # whatever code of the model may raise
            if (shown := explained(self.model, error)) is error:
                raise
            raise shown from error
        pairs: list[tuple[Tensor, Tensor]] = []
        first = next(index for index, layer in enumerate(cache.layers) if layer.shape.has_rows)
        if cache.capacity[first] >= _NUM_TOKENS:  # a shorter window has dropped others of each
            layer = cache.layers[first]
            keys, values = layer.keys[:, :, :2], layer.values[:, :, :2]
            pairs += [(keys[0], keys[1]), (values[0], values[1])]
        if self.model.dtype.itemsize >= 4:  # else rounding may choose other experts
            pairs.append((prefilled, decoded))
        if not all(_are_close(*pair) for pair in pairs):
            msg = (
                f"model {type(self.model).__name__} cannot be run: two tokens get other numbers "
                "beside a longer prompt than alone, so it counts positions, or attends, in a way "
                "of its own"
            )
            msg += "; give eager=True, which may run it" if static else ""
            raise ModelError(msg)
        return cache

    def _run_both_ways(self, *, static: bool) -> tuple[KVCache, Tensor, Tensor]:
        """Prefill prompts of three tokens and one, and decode one more token of each.

        The first sequence is the longest, of `_NUM_TOKENS`.

        Returns:
            The cache, and the logits after two tokens: prefilled without pads, and decoded.
        """
        cache, token = self.new_cache(2, _NUM_TOKENS), self.token
        if cache.states:
            return cache, *self._run_chunks(cache)
        prompts = torch.tensor([[token] * 3, [0, 0, token]])
        chunk = EagerStep(cache, [0, 1], [3, 1])
        prefill = ForwardInput(prompts, chunk, wants_logits=True)
        self.forward(prefill)
        assert prefill.logits is not None
        chunk.commit()
        step: StaticStep | EagerStep = EagerStep(cache, [0, 1], [1, 1])
        if static:
            step = StaticStep(cache, once=True)  # the first token need not wait for Numba
            step.begin([token] * 2, [])
        logits, _ = self.forward(ForwardInput(torch.tensor([[token]] * 2), step))
        return cache, prefill.logits[0, 1], logits[1]

    def _run_chunks(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Logits after `_NUM_TOKENS` of a prompt that is brought in whole, and in parts.

        So it is for models whose states take no pads. Some go on with their states by one token
        only, and begin anew with more: these get one at a time.
        """
        cache.one_by_one = self._begins_anew(cache)
        parts = [1] * _NUM_TOKENS if cache.one_by_one else [1, _NUM_TOKENS - 2, 1]
        whole = self._logits_after(cache, 0, [_NUM_TOKENS])
        return whole, self._logits_after(cache, 1, parts)

    def _begins_anew(self, cache: KVCache) -> bool:
        """Whether several tokens leave the same states, whatever states they go on with."""
        for slot in range(2):
            self._logits_after(cache, slot, [1])
        recurrent = [
            state
            for layer in cache.states.values()
            for name, state in layer.states.items()
            if name.startswith("recurrent")
        ][:1]
        for state in recurrent:
            state[1] = 0
        for slot in range(2):
            self._logits_after(cache, slot, [2])
        found = any(torch.equal(state[0], state[1]) for state in recurrent)
        for slot in range(2):
            cache.clear(slot)
        return found

    def _logits_after(self, cache: KVCache, slot: int, lengths: Sequence[int]) -> Tensor:
        """Logits ``[V]`` after a prompt that is brought in in parts."""
        for length in lengths:
            step = EagerStep(cache, [slot], [length])
            tokens = torch.full((1, length), self.token)
            logits, _ = self.forward(ForwardInput(tokens, step))
            step.commit()
        return logits[0]

    def _check_positions(self) -> None:
        """Compare the positions that we give with those that a model counts in `generate`.

        Raises:
            ModelError: If they are others.
        """
        if not counts_positions(self.model):
            return
        cache, tokens = self.new_cache(1, _NUM_TOKENS), torch.full((1, _NUM_TOKENS), self.token)
        logits = []
        for gives_positions in (True, False):
            step = EagerStep(cache, [0], [_NUM_TOKENS])
            given = ForwardInput(tokens, step, gives_positions=gives_positions)
            logits.append(self.forward(given)[0][0])
            step.discard()
        if not _are_close(*logits):
            msg = (
                f"model {type(self.model).__name__} cannot be run: its generate gives it no "
                "positions of tokens, and it counts them in another way than from 0"
            )
            raise ModelError(msg)


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, by the norm of their difference."""
    share = 0.05 if first.dtype.itemsize < 4 else 0.01
    distance = (first.float() - second.float()).norm()
    return not distance > share * first.float().norm()  # NaN is no matter of how it is run
