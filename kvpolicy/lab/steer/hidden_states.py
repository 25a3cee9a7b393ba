"""Hidden states before thoughts, from one forward pass over each trace."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.lab.steer.thoughts import Thought
from kvpolicy.model.decoder import decoder_layers, decoder_of

_TOKENS_PER_FORWARD = 16_384  # padding included


@attrs.frozen
class MarkedTrace:
    """A trace with its thoughts.

    Attributes:
        token_ids: Prompt and generation.
        thoughts: Its thoughts, at least one.
    """

    token_ids: Sequence[int]
    thoughts: Sequence[Thought]


@attrs.frozen(eq=False)
class States:
    """Hidden states from one forward pass.

    Attributes:
        kinds: Kind of each thought, ``N`` of them.
        by_layer: Input of each layer at the delimiters before the thoughts, ``[N, M]``, fp32, on
            the CPU.
        num_traces: Traces in the forward pass.
    """

    kinds: Sequence[str]
    by_layer: dict[int, Tensor]
    num_traces: int


def states_before_thoughts(
    model: PreTrainedModel, traces: Sequence[MarkedTrace], layers: Sequence[int]
) -> Iterator[States]:
    """Run a model over traces and collect the inputs of some layers.

    Args:
        model: The model.
        traces: Texts that it has generated.
        layers: Decoder layers, from 0.

    Yields:
        The states of one batch of traces at a time, the shortest traces first.
    """
    decoder, layers_of = decoder_of(model), decoder_layers(model)
    inputs: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer in layers:
            handle = layers_of[layer].register_forward_pre_hook(_recorder(inputs, layer))
            hooks.callback(handle.remove)
        for batch in _batches(traces):
            _forward(decoder, batch, model.device)
            rows = torch.tensor([b for b, trace in enumerate(batch) for _ in trace.thoughts])
            positions = torch.tensor([t.position for trace in batch for t in trace.thoughts])
            yield States(
                kinds=[thought.kind for trace in batch for thought in trace.thoughts],
                by_layer={
                    layer: states[rows.to(states.device), positions.to(states.device)].float().cpu()
                    for layer, states in inputs.items()
                },
                num_traces=len(batch),
            )


def _recorder(inputs: dict[int, Tensor], layer: int) -> Any:
    def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs[layer] = arguments[0]  # [B, T, M]

    return record


def _batches(traces: Sequence[MarkedTrace]) -> Iterator[list[MarkedTrace]]:
    """Batches of traces of similar length, up to the size of a forward pass."""
    batch: list[MarkedTrace] = []
    for trace in sorted(traces, key=lambda trace: len(trace.token_ids)):
        if batch and (len(batch) + 1) * len(trace.token_ids) > _TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(trace)
    if batch:
        yield batch


@torch.inference_mode()
def _forward(decoder: nn.Module, batch: Sequence[MarkedTrace], device: torch.device) -> None:
    """Run the decoder on right-padded rows; causal attention never reaches the padding."""
    longest = max(len(trace.token_ids) for trace in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros(len(batch), longest, dtype=torch.int64)
    for b, trace in enumerate(batch):
        input_ids[b, : len(trace.token_ids)] = torch.tensor(trace.token_ids)
        mask[b, : len(trace.token_ids)] = 1
    decoder(input_ids=input_ids.to(device), attention_mask=mask.to(device), use_cache=False)
