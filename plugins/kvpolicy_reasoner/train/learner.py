"""One optimizer step: bfloat16 forward and backward passes, float32 parameters, several processes.

Attention: on CPUs, scaled dot product attention in bfloat16 takes several times as long as plain
matrix products and a softmax. Taking the queries in chunks skips most of the masked half.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen2ForCausalLM

from kvpolicy_reasoner.train.data import Batch, Example, collate
from kvpolicy_reasoner.train.loss_weights import AFTER_NEWLINES_WEIGHT
from kvpolicy_reasoner.train.optimizer import ReasonerOptimizer
from kvpolicy_reasoner.train.recipes import Recipe


@attrs.frozen
class Team:
    """What a process knows about the others.

    Attributes:
        rank: Which process this is, from 0; 0 is the one that was called.
        size: How many processes there are.
    """

    rank: int
    size: int

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes.

        Args:
            tensor: A tensor of the same shape in every process.
        """
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            dist.barrier()


def run_together(size: int, work: Callable[[Team], None], *, lead: Callable[[Team], None]) -> None:
    """Run work in several processes of one thread each; this process is the first of them.

    Args:
        size: How many processes.
        work: What the others do; handed to fresh interpreters, so it holds plain values only.
        lead: What this process does.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        meeting_point = f"file://{Path(folder) / 'meeting-point'}"
        others = [
            context.Process(target=_join, args=(meeting_point, Team(rank, size), work), daemon=True)
            for rank in range(1, size)
        ]
        for process in others:
            process.start()
        try:
            _join(meeting_point, Team(0, size), lead)
        except BaseException:
            for process in others:
                process.terminate()
            raise
        for process in others:
            process.join()


def _join(meeting_point: str, team: Team, work: Callable[[Team], None]) -> None:
    torch.set_num_threads(1)
    if team.size == 1:
        work(team)
        return
    dist.init_process_group("gloo", init_method=meeting_point, rank=team.rank, world_size=team.size)
    try:
        work(team)
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
    """Make the attention known to transformers.

    Returns:
        The name to give as ``attn_implementation``.
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
    """Attend causally over right-padded rows, where no padding is ever looked at.

    Args:
        module: The attention layer that asks.
        query: Queries after RoPE, ``[B, H_q, T, D]``.
        key: Keys after RoPE, ``[B, H_kv, T, D]``.
        value: Values, ``[B, H_kv, T, D]``.
        attention_mask: Has to be none.
        scaling: Factor on the logits.

    Returns:
        The output, ``[B, T, H_q, D]``, and no weights.
    """
    assert attention_mask is None, "training rows are padded on the right and need no mask"
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query = (query * scaling).unflatten(1, (num_kv_heads, -1))  # [B, H_kv, G, T, D]
    key = key.transpose(-1, -2)  # [B, H_kv, D, T]
    future = torch.full((_CHUNK, _CHUNK), -torch.inf, dtype=query.dtype).triu(1)

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
    """What one step measured before it changed the parameters.

    Attributes:
        loss: Mean cross-entropy over the trace, with the weights of training.
        settled: Mean over the tokens that the prompt and the trace so far determine.
        lr: Learning rate of the step.
    """

    loss: float
    settled: float
    lr: float


class Learner:
    """The model in training: a bfloat16 copy that computes, float32 parameters that learn."""

    def __init__(self, recipe: Recipe, seed: int, num_steps: int, team: Team) -> None:
        """Build the model to start from and its optimiser.

        Args:
            recipe: Which reasoner.
            seed: Chooses the untrained weights.
            num_steps: Steps of the whole run.
            team: The processes that share each step.
        """
        self._team = team
        self.recipe = recipe
        model = recipe.new_model(seed)
        self.parameters = {
            name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()
        }
        self.model = model.bfloat16()
        self.model.set_attn_implementation(register_training_attention())
        self._optimizer = ReasonerOptimizer(self.parameters, num_steps, recipe.peak_lr)
        self._publish()

    def step(self, step: int, examples: Sequence[Example]) -> StepLosses:
        """Learn from the examples of one step.

        Args:
            step: Which step, from 0.
            examples: All examples of the step; this process takes its share of them.

        Returns:
            The losses over all examples.
        """
        sums = self._accumulate(examples[self._team.rank :: self._team.size])
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        gradients = [
            torch.zeros_like(master) if copy.grad is None else copy.grad.float()
            for master, copy in zip(self.parameters.values(), self.model.parameters(), strict=True)
        ]
        flat = torch.cat([sums, *(gradient.flatten() for gradient in gradients)])
        self._team.add_up(flat)
        totals, *pieces = flat.split([len(sums), *sizes])
        loss, weight, settled, num_settled = totals.tolist()
        for parameter, piece in zip(self.parameters.values(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter) / weight
        lr = self._optimizer.step(step)
        self._publish()
        return StepLosses(loss=loss / weight, settled=settled / max(num_settled, 1.0), lr=lr)

    @torch.no_grad()
    def snapshot(self) -> Qwen2ForCausalLM:
        """Copy the model as it would be saved.

        Returns:
            A float32 model with the plain attention and parameters rounded to bfloat16.
        """
        snapshot = self.recipe.new_model(0)
        for name, parameter in snapshot.named_parameters():
            parameter.copy_(self.parameters[name].to(torch.bfloat16))
        return snapshot.eval()

    def state(self) -> dict[str, Tensor]:
        """Return everything that a resumed run has to take over.

        Returns:
            Parameters and optimiser state.
        """
        parameters = {_PARAMETER + name: p.detach() for name, p in self.parameters.items()}
        return {**parameters, **self._optimizer.state()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` returned.

        Args:
            tensors: The saved state.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[_PARAMETER + name])
        self._optimizer.load_state(tensors)
        self._publish()

    def _accumulate(self, examples: Sequence[Example]) -> Tensor:
        """Add up losses and their gradients.

        The gradients are those of the sum, not of the mean: how many tokens the other processes
        saw is known only after the sums have met.

        Returns:
            Loss, weight, loss of the determined tokens, and their number, ``[4]``.
        """
        self.model.zero_grad(set_to_none=True)
        if not examples:
            return torch.zeros(4)
        batch = collate(examples)
        losses, weights = self._losses(batch)
        loss = (losses * weights).sum()
        loss.backward()
        settled = weights > AFTER_NEWLINES_WEIGHT
        return torch.stack(
            [loss.detach(), weights.sum(), losses.detach()[settled].sum(), settled.sum()]
        )

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy and the weight of every trace token, ``[N]`` each."""
        hidden = self.model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        counts = batch.weights > 0  # [B, T - 1]
        logits = self.model.lm_head(hidden[:, :-1][counts]).float()  # [N, V]
        targets = batch.input_ids[:, 1:][counts]
        return F.cross_entropy(logits, targets, reduction="none"), batch.weights[counts]

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the float32 parameters into the copy that computes."""
        for parameter, copy in zip(self.parameters.values(), self.model.parameters(), strict=True):
            copy.copy_(parameter)
