"""Training of gates: the model is frozen, and learns to do with fewer rows.

``L = (KL(teacher || student) + NTP) / 2 + lambda L_cap`` with ``quality_reduce = "mean"``, as in
the authors' code of 2026; the paper's sum is ``"sum"``. The teacher is the model without gates. The
texts of a step depend on the seed and the step alone, so that a run goes on from a checkpoint as if
it had never stopped.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from attrs.validators import ge, gt, in_, instance_of, le
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvpolicy import KVPolicyError
from kvpolicy_plugins.trimkv.gates import (
    FORMS,
    INTERMEDIATE_SIZE,
    Form,
    Gates,
    new_gate,
)
from kvpolicy_plugins.trimkv.retention import CapNorm, CapOver, capacity_loss
from kvpolicy_plugins.trimkv.student import Student

QualityReduce = Literal["mean", "sum"]

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_CLIP_NORM = 1.0
_MIN_LR = 0.1  # share of the peak at the end of the cosine
_LOGIT_ROWS = 8192  # tokens whose logits are in memory at once, as in the authors' code


@attrs.frozen(kw_only=True)
class Recipe:
    """How gates are trained; equal recipes and texts give equal gates.

    Attributes:
        steps: Optimizer steps.
        batch: Texts of a step.
        memory: Rows that a head may hold, ``M``; below 1 a share of the longest text of a batch.
        lr: Peak learning rate of AdamW: after a linear warm-up it falls as a cosine to a tenth.
        warmup: Steps of the warm-up.
        weight_decay: Of AdamW, for matrices.
        bias: What the bias of a gate begins with; ``None``: ``ln(T / 0.5)``, for the mean length
            ``T`` of the texts, so that a text holds on to about all of itself. The paper's 18 is
            for texts of ten thousands of tokens and as many steps.
        form: Form of the gates, as in `Gate`.
        intermediate_size: Width of their hidden layer.
        max_tokens: Tokens of a text that are used.
        weight: Weight of the capacity loss, ``lambda``.
        quality_reduce: ``"mean"`` or ``"sum"`` of the two losses that keep the model's quality.
        cap_norm: See `capacity_loss`.
        cap_over: See `capacity_loss`.
        seed: Draws the first weights, and the texts of each step.
    """

    steps: int = attrs.field(default=400, validator=[instance_of(int), ge(1)])
    batch: int = attrs.field(default=4, validator=[instance_of(int), ge(1)])
    memory: float = attrs.field(default=32.0, converter=float, validator=gt(0))
    lr: float = attrs.field(default=3e-3, converter=float, validator=gt(0))
    warmup: int = attrs.field(default=20, validator=[instance_of(int), ge(0)])
    weight_decay: float = attrs.field(default=0.01, converter=float, validator=ge(0))
    bias: float | None = None
    form: Form = attrs.field(default="rg", validator=in_(FORMS))
    intermediate_size: int = attrs.field(
        default=INTERMEDIATE_SIZE, validator=[instance_of(int), ge(1)]
    )
    max_tokens: int = attrs.field(default=4096, validator=[instance_of(int), ge(2)])
    weight: float = attrs.field(default=1.0, converter=float, validator=ge(0))
    quality_reduce: QualityReduce = attrs.field(default="mean", validator=in_(["mean", "sum"]))
    cap_norm: CapNorm = attrs.field(default="active", validator=in_(["active", "paper"]))
    cap_over: CapOver = attrs.field(default="head", validator=in_(["head", "model"]))
    seed: int = attrs.field(default=0, validator=[instance_of(int), ge(0), le(2**31)])


@attrs.frozen(kw_only=True)
class StepRecord:
    """What a step has shown.

    Attributes:
        step: Steps done.
        kl: Divergence from the teacher, nats per token.
        ntp: Cross-entropy, nats per token.
        capacity: The capacity loss.
        occupancy: Rows that a head softly holds at the end of a text, in the mean.
        lr: Learning rate.
    """

    step: int
    kl: float
    ntp: float
    capacity: float
    occupancy: float
    lr: float


class Trainer:
    """A run: gates, the state of their optimizer, and the step that comes next.

    ``state`` and ``load_state`` are the checkpoint: tensors by name.

    Attributes:
        done: Steps done.
    """

    def __init__(
        self, model: PreTrainedModel, texts: Sequence[Sequence[int]], recipe: Recipe
    ) -> None:
        """Begin.

        Args:
            model: The model; its parameters are frozen.
            texts: Token ids of the texts, at least two each.
            recipe: How to train.

        Raises:
            KVPolicyError: There are no texts, or the model cannot be a student.
        """
        self._texts = [text[: recipe.max_tokens] for text in texts if len(text) > 1]
        if not self._texts:
            msg = "gates cannot be trained without texts of two tokens and more; give some"
            raise KVPolicyError(msg)
        self.recipe = recipe
        self.done = 0
        model.requires_grad_(False)
        self._student = Student(model)
        self._device = model.device
        self.gates = self._new_gates(model)
        self._named = {
            f"{layer}.{name}": tensor
            for layer, gate in self.gates.by_layer.items()
            for name, tensor in gate.tensors.items()
        }
        for tensor in self._named.values():
            tensor.requires_grad_(True)
        matrices = [tensor for tensor in self._named.values() if tensor.dim() == 2]
        others = [tensor for tensor in self._named.values() if tensor.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=recipe.lr,
            betas=_BETAS,
            eps=_EPS,
        )

    @property
    def bias(self) -> float:
        """What the biases began with."""
        if self.recipe.bias is not None:
            return self.recipe.bias
        mean_length = sum(map(len, self._texts)) / len(self._texts)
        return math.log(mean_length / 0.5)

    def steps(self) -> Iterator[StepRecord]:
        """Do the steps that are left; after each, `state` is complete.

        Yields:
            What each step has shown.
        """
        with self._student:
            while self.done < self.recipe.steps:
                yield self._step()

    def state(self) -> dict[str, Tensor]:
        """Gates and state of the optimizer, by name; copies."""
        tensors = {name: tensor.detach().clone() for name, tensor in self._named.items()}
        for name, tensor in self._named.items():
            for key, value in self._optimizer.state.get(tensor, {}).items():
                tensors[f"{key}:{name}"] = value.detach().clone()
        return tensors

    def load_state(self, tensors: dict[str, Tensor], done: int) -> None:
        """Go on from a state that `state` gave after so many steps.

        Raises:
            KVPolicyError: It is that of another run.
        """
        if any(
            name not in tensors or tensors[name].shape != own.shape
            for name, own in self._named.items()
        ):
            msg = "the checkpoint is of gates with other shapes; start over with --restart"
            raise KVPolicyError(msg)
        with torch.no_grad():
            for name, own in self._named.items():
                own.copy_(tensors[name])
        for name, own in self._named.items():
            state = {key: tensors.get(f"{key}:{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if done:
                self._optimizer.state[own] = {
                    key: value.to(own.device if key != "step" else "cpu")
                    for key, value in state.items()
                    if value is not None
                }
        self.done = done

    def _new_gates(self, model: PreTrainedModel) -> Gates:
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed)
        config: Any = model.config.get_text_config(decoder=True)
        act: str = getattr(config, "hidden_act", None) or config.hidden_activation
        num_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        reads_states = recipe.form == "rg"
        return Gates(
            by_layer={
                layer: new_gate(
                    recipe.form,
                    num_inputs=config.hidden_size if reads_states else 2 * head_dim * num_heads,
                    num_heads=num_heads,
                    intermediate_size=recipe.intermediate_size,
                    hidden_act=act,
                    bias=self.bias,
                    generator=generator,
                ).to(self._device)
                for layer in range(self._student.num_layers)
            }
        )

    def _step(self) -> StepRecord:
        token_ids, lengths = self._batch()
        present = torch.arange(token_ids.shape[1]) < lengths[:, None]
        token_ids, present = token_ids.to(self._device), present.to(self._device)
        recipe, lr = self.recipe, self._learning_rate()
        teacher = self._student.teach(token_ids)
        student, log_beta = self._student.learn(token_ids, self.gates)
        kl, ntp = self._quality(teacher, student, token_ids, present)
        memory = recipe.memory
        if memory < 1:
            memory *= token_ids.shape[1]
        capacity = capacity_loss(
            log_beta, memory, present=present, norm=recipe.cap_norm, over=recipe.cap_over
        )
        quality = (kl + ntp) / 2 if recipe.quality_reduce == "mean" else kl + ntp
        self._optimizer.zero_grad(set_to_none=True)
        (quality + recipe.weight * capacity).backward()
        torch.nn.utils.clip_grad_norm_(self._named.values(), _CLIP_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.done += 1
        return StepRecord(
            step=self.done,
            kl=float(kl.detach()),
            ntp=float(ntp.detach()),
            capacity=float(capacity.detach()),
            occupancy=_last_occupancy(log_beta.detach(), lengths),
            lr=lr,
        )

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Texts of the next step, ``[B, T]``, padded on the right, and their lengths."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.done)
        chosen = torch.randint(len(self._texts), (self.recipe.batch,), generator=generator)
        texts = [torch.tensor(self._texts[index]) for index in chosen.tolist()]
        lengths = torch.tensor([len(text) for text in texts])
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths

    def _quality(
        self, teacher: Tensor, student: Tensor, token_ids: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Divergence and cross-entropy per token, over the tokens that are predicted."""
        counted = present[:, 1:]
        before, after = teacher[:, :-1][counted], student[:, :-1][counted]  # [N, M]
        targets = token_ids[:, 1:][counted]
        kl, ntp = after.new_zeros((), dtype=torch.float32), after.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), _LOGIT_ROWS):
            rows = slice(start, start + _LOGIT_ROWS)
            with torch.no_grad():
                wanted = self._student.logits(before[rows]).log_softmax(dim=-1)
            found = self._student.logits(after[rows]).log_softmax(dim=-1)
            kl = kl + F.kl_div(found, wanted, reduction="sum", log_target=True)
            ntp = ntp + F.nll_loss(found, targets[rows], reduction="sum")
        return kl / len(targets), ntp / len(targets)

    def _learning_rate(self) -> float:
        recipe, step = self.recipe, self.done + 1
        if step <= recipe.warmup:
            return recipe.lr * step / recipe.warmup
        passed = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return recipe.lr * (_MIN_LR + (1 - _MIN_LR) * (1 + math.cos(math.pi * passed)) / 2)


def _last_occupancy(log_beta: Tensor, lengths: Tensor) -> float:
    """Soft occupancy after the last token of each text, in the mean over texts and heads."""
    t = (lengths[:, None] - 1 - torch.arange(log_beta.shape[-1])).to(log_beta.device)  # [B, T]
    weights = (log_beta * t.clamp(min=0)[None, :, None]).exp()
    return float(weights.where(t[None, :, None] >= 0, 0).sum(dim=-1).mean())
