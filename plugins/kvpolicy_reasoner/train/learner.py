"""Optimizer steps: forward and backward passes, float32 parameters, several processes.

On CPUs, scaled dot product attention in bfloat16 takes several times as long as matrix products and
a softmax. Processing the queries in chunks skips most of the masked half.
"""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvpolicy.lab.executors.parent import end_with_parent
from kvpolicy.model.loading import move
from kvpolicy_reasoner.train.data import Batch, Example, collate
from kvpolicy_reasoner.train.loss_weights import AFTER_NEWLINES_WEIGHT
from kvpolicy_reasoner.train.optimizer import ReasonerOptimizer
from kvpolicy_reasoner.train.recipes import Recipe


@attrs.frozen
class ProcessGroup:
    """Processes that share each training step.

    Attributes:
        rank: Rank of this process; 0 is the process that called `run_distributed`.
        size: Number of processes.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes.

        Args:
            tensor: A tensor of the same shape in every process.
        """
        if self.size > 1:
            dist.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.size > 1:
            dist.barrier()


def run_distributed(
    size: int, work: Callable[[ProcessGroup], None], *, lead: Callable[[ProcessGroup], None]
) -> None:
    """Run a function in several single-thread processes; this process has rank 0.

    Args:
        size: Number of processes.
        work: Called in the other processes; must be picklable.
        lead: Called in this process.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        others = [
            context.Process(
                target=_follow, args=(rendezvous, ProcessGroup(rank, size), work), daemon=True
            )
            for rank in range(1, size)
        ]
        for process in others:
            process.start()
        try:
            _join(rendezvous, ProcessGroup(0, size), lead)
        except BaseException:
            for process in others:
                process.terminate()
            raise
        for process in others:
            process.join()


def _follow(rendezvous: str, processes: ProcessGroup, work: Callable[[ProcessGroup], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leading process ends the others
    end_with_parent()
    _join(rendezvous, processes, work)


def _join(rendezvous: str, processes: ProcessGroup, work: Callable[[ProcessGroup], None]) -> None:
    torch.set_num_threads(1)
    if processes.size == 1:
        work(processes)
        return
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=processes.rank, world_size=processes.size
    )
    try:
        work(processes)
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


NAME = "kvpolicy_chunked_causal"

_CHUNK = 128


def register_training_attention() -> str:
    """Register the attention function with transformers.

    Returns:
        Its ``attn_implementation``.
    """
    AttentionInterface.register(NAME, chunked_causal_attention)
    return NAME


def chunked_causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention over right-padded rows; no token attends to padding.

    Args:
        module: The attention layer.
        query: Queries after RoPE, ``[B, H_q, T, D]``.
        key: Keys after RoPE, ``[B, H_kv, T, D]``.
        value: Values, ``[B, H_kv, T, D]``.
        attention_mask: Must be ``None``.
        scaling: Factor on the logits.

    Returns:
        The output, ``[B, T, H_q, D]``, and ``None`` for the weights.
    """
    assert attention_mask is None, "right-padded rows need no mask"
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query = (query * scaling).unflatten(1, (num_kv_heads, -1))  # [B, H_kv, G, T, D]
    key = key.transpose(-1, -2)  # [B, H_kv, D, T]
    future = query.new_full((_CHUNK, _CHUNK), -torch.inf).triu(1)

    outputs = []
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        chunk = query[:, :, :, start:stop].flatten(2, 3)  # [B, H_kv, G * C, D]
        logits = chunk @ key[..., :stop]  # [B, H_kv, G * C, stop]
        by_query = logits.unflatten(2, (-1, stop - start))
        by_query[..., start:] += future[: stop - start, : stop - start]
        output = logits.softmax(dim=-1) @ value[:, :, :stop]
        outputs.append(output.unflatten(2, (-1, stop - start)))
    joined = torch.cat(outputs, dim=3)  # [B, H_kv, G, T, D]
    return joined.reshape(batch, num_heads, length, head_dim).transpose(1, 2), None


_PARAMETER = "parameter."


@attrs.frozen
class StepLosses:
    """Losses of one step, before its update.

    Attributes:
        loss: Mean cross-entropy over the trace, with loss weights.
        settled: Mean cross-entropy over tokens that the text before them determines.
        lr: Learning rate of the step.
    """

    loss: float
    settled: float
    lr: float


class Learner:
    """A model in training: float32 parameters, and a copy in bfloat16 for the passes."""

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        num_steps: int,
        processes: ProcessGroup,
        device: str = "cpu",
    ) -> None:
        """Build the initial model and its optimizers.

        Args:
            recipe: Training recipe of the reasoner.
            seed: Random seed for initial weights.
            num_steps: Steps of the whole run.
            processes: The processes that share each step.
            device: Where steps are computed.
        """
        self._processes = processes
        self._device = device
        self.recipe = recipe
        model = move(recipe.new_model(seed), device)
        self.parameters = {
            name: nn.Parameter(value.detach().clone())
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        self.model = model.to(torch.bfloat16)  # type: ignore[arg-type] # its self is lost
        copies = dict(self.model.named_parameters())
        self._copies = [copies[name] for name in self.parameters]
        self.model.set_attn_implementation(register_training_attention())
        self._optimizer = ReasonerOptimizer(self.parameters, num_steps, recipe.peak_lr)
        self._update_copy()

    def step(self, step: int, examples: Sequence[Example]) -> StepLosses:
        """Update the parameters from the examples of one step.

        Args:
            step: Number of the step, from 0.
            examples: All examples of the step; each process uses its share of them.

        Returns:
            The losses over all examples.
        """
        sums = self._accumulate(examples[self._processes.rank :: self._processes.size])
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        gradients = [
            torch.zeros_like(master) if copy.grad is None else copy.grad.float()
            for master, copy in zip(self.parameters.values(), self._copies, strict=True)
        ]
        flat = torch.cat([sums, *(gradient.flatten() for gradient in gradients)])
        self._processes.all_reduce(flat)
        totals, *pieces = flat.split([len(sums), *sizes])
        loss, weight, settled, num_settled = totals.tolist()
        for parameter, piece in zip(self.parameters.values(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter) / weight
        lr = self._optimizer.step(step)
        self._update_copy()
        return StepLosses(loss=loss / weight, settled=settled / max(num_settled, 1.0), lr=lr)

    @torch.no_grad()
    def snapshot(self) -> PreTrainedModel:
        """Copy the model as it would be exported.

        Returns:
            A float32 model with default attention and parameters rounded to bfloat16.
        """
        snapshot = self.recipe.new_model(0)
        parameters = dict(snapshot.named_parameters())
        for name, value in self.parameters.items():
            parameters[name].copy_(value.to(torch.bfloat16))
        return move(snapshot.eval(), self._device)

    def state(self) -> dict[str, Tensor]:
        """The state that a resumed run needs: parameters and optimizer state."""
        parameters = {_PARAMETER + name: p.detach() for name, p in self.parameters.items()}
        return {**parameters, **self._optimizer.state()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load a state returned by `state`.

        Args:
            tensors: The saved state.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[_PARAMETER + name])
        self._optimizer.load_state(tensors)
        self._update_copy()

    def _accumulate(self, examples: Sequence[Example]) -> Tensor:
        """Sum losses and compute the gradients of the sum.

        Gradients are of the sum, not of the mean, because the total weight is known only after
        the sums of all processes have been added.

        Returns:
            Loss, weight, loss of the determined tokens, and their number, ``[4]``.
        """
        self.model.zero_grad(set_to_none=True)
        if not examples:
            return torch.zeros(4, device=self._device)
        batch = collate(examples).to(self._device)
        losses, weights = self._losses(batch)
        loss = (losses * weights).sum()
        loss.backward()
        settled = weights > AFTER_NEWLINES_WEIGHT
        return torch.stack(
            [loss.detach(), weights.sum(), losses.detach()[settled].sum(), settled.sum()]
        )

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross-entropy and the weight of each trace token, ``[N]`` each."""
        hidden = self.model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        counts = batch.weights > 0  # [B, T - 1]
        logits = self.model.lm_head(hidden[:, :-1][counts]).float()  # [N, V]
        targets = batch.input_ids[:, 1:][counts]
        return F.cross_entropy(logits, targets, reduction="none"), batch.weights[counts]

    @torch.no_grad()
    def _update_copy(self) -> None:
        """Round the float32 parameters into the copy for the passes."""
        for parameter, copy in zip(self.parameters.values(), self._copies, strict=True):
            copy.copy_(parameter)
