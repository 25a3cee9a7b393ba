"""The seam to transformers: all that depends on its releases, 5.2 to 5.23.

A model runs unmodified. It is told to call our attention function, gets our cache as
``past_key_values``, and logical ``position_ids``. What differs between 5.2 and 5.23:

* models call ``Cache.update(k, v, layer_idx, cache_kwargs)``, later without the last argument;
* models make ``cache_position`` from ``get_seq_length()`` and build masks with it, later not;
  either way they build no mask for an attention function without a mask function of its name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvpolicy.cache.layout import StepLayout
from kvpolicy.cache.slab import LayerShape, Rotate
from kvpolicy.errors import ModelError
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import Clock
from kvpolicy.model.attention import attention_function
from kvpolicy.model.config import (
    check_runs,
    decoder_layers,
    layer_shape,
    sliding_windows,
    stop_ids,
)
from kvpolicy.model.forward import Forward, SlabCache
from kvpolicy.model.peers import SINGLE, TensorParallelGroup
from kvpolicy.model.rope import Rotation
from kvpolicy.model.tensor_parallel import holders_of_heads, peers_of
from kvpolicy.state import Registers

ATTENTION = "kvpolicy"


class ModelAdapter:
    """One model as the engine sees it.

    Attributes:
        num_layers: Decoder layers.
        vocab_size: Token ids run from 0 to below this.
        max_positions: Tokens a sequence may have, prompt and generation together.
        stop_ids: Tokens that end a generation, by the model's own configuration.
        hidden_size: Size of the hidden state, ``M``.
        peers: The processes that hold the model together.
    """

    peers: TensorParallelGroup = SINGLE

    def __init__(self, model: PreTrainedModel) -> None:
        """Look at a model; raises `ModelError` if the engine cannot run it."""
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        check_runs(model, self._config)
        AttentionInterface.register(ATTENTION, attention_function)
        self._layers = decoder_layers(model)
        self._windows = sliding_windows(self._config)
        self.num_layers: int = self._config.num_hidden_layers
        self.vocab_size: int = self._config.vocab_size
        self.hidden_size: int = self._config.hidden_size
        self.max_positions: int = self._config.max_position_embeddings
        self.stop_ids = stop_ids(model)
        self.peers = peers_of(model)
        self._heads = holders_of_heads(model, self._config, self.peers)

    def layer_shapes(self) -> list[LayerShape]:
        """What each layer's keys and values look like, and on which device they live."""
        devices = [next(layer.parameters()).device for layer in self._layers]
        return [
            layer_shape(self._config, self.model.dtype, device, window, self._heads)
            for device, window in zip(devices, self._windows, strict=True)
        ]

    def rotation(self) -> Rotate:
        """What moves keys of a layer to other positions, as this model turns them."""
        return Rotation(self)

    @property
    def last_device(self) -> torch.device:
        """Where the last layer's states live."""
        return next(self._layers[-1].parameters()).device

    def forward(
        self, token_ids: Tensor, step: StepLayout, *, wants_states: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over the new tokens of a step.

        Args:
            token_ids: ``[B, L]``, int64, padded on the left.
            step: Where their rows go; counted when all layers have stored theirs.
            wants_states: Whether the last hidden states are wanted.

        Returns:
            Logits after the newest token of each sequence, ``[B, V]``, and, if wanted, the
            hidden states after the final norm, ``[B, L, M]``.
        """
        with torch.inference_mode(), self.running(token_ids, step, wants_states) as forward:
            output = self.model(**forward.arguments)
        return output.logits[:, -1], forward.last_states

    @contextmanager
    def running(self, token_ids: Tensor, step: StepLayout, wants_states: bool) -> Iterator[Forward]:
        """Have the model serve a step when it is called in the block, which it must be once.

        Args:
            token_ids: As for `forward`.
            step: As for `forward`.
            wants_states: As for `forward`.

        Yields:
            What to call the model with, and where its last states will be found.
        """
        device = self.model.device
        cache = SlabCache(step)
        with attending(self.model.config), ExitStack() as block:
            states = block.enter_context(_last_states(self.model)) if wants_states else []
            arguments = {
                "input_ids": token_ids.to(device),
                "position_ids": torch.from_numpy(step.position_ids).to(device),
                "past_key_values": cache,
                "use_cache": True,
                "logits_to_keep": 1,
                "kvpolicy_step": step,
            }
            yield Forward(arguments, states)
        done = len(cache.stored & step.attended)
        if done != self.num_layers:
            msg = (
                f"model {type(self.model).__name__} cannot be run: {done} of its "
                f"{self.num_layers} layers use the cache and the attention they are given"
            )
            raise ModelError(msg)
        step.commit()

    @contextmanager
    def steered(
        self,
        stacks: Sequence[Stack],
        token_ids: Tensor,
        clock: Clock,
        registers: Registers,
        **arguments: Any,
    ) -> Iterator[None]:
        """Add what policies answer to `steer` to the states entering their layers.

        Args:
            stacks: Policies of each layer.
            token_ids: Tokens of the decode step to come, ``[B]``.
            clock: Where the seconds go.
            registers: Numbers of the policies; given to them where the states are.
            arguments: What else `Stack.steer` takes.
        """
        with ExitStack() as hooks:
            for layer_idx, stack in enumerate(stacks):
                if stack.is_steered(layer_idx):
                    ask = partial(stack.steer, layer_idx, **arguments)
                    hook = _steering_hook(ask, token_ids, registers, clock)
                    handle = self._layers[layer_idx].register_forward_pre_hook(hook)
                    hooks.callback(handle.remove)
            yield


def _steering_hook(
    ask: Callable[..., Tensor | None], token_ids: Tensor, registers: Registers, clock: Clock
) -> Any:
    def steer(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = arguments[0]  # [B, 1, M]
        with clock.time("steer_s", None), registers.on(states.device) as there:
            change = ask(states[:, -1], token_ids.to(states.device), registers=there)
        return arguments if change is None else (states + change[:, None], *arguments[1:])

    return steer


@contextmanager
def _last_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Receive what the decoder gives to the head: ``[B, L, M]``, after the final norm."""
    received: list[Tensor] = []

    def receive(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        received.append(output.last_hidden_state)

    handle = model.get_decoder().register_forward_hook(receive)
    try:
        yield received
    finally:
        handle.remove()


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """Have a model call our attention function for the length of a block, and no longer."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
