"""Optimizers: Muon for matrices, AdamW for all other parameters, with one learning rate."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

PEAK_LR = 4e-3

_WARM_UP = 0.02
_DECAY_FROM = 0.45
_MUON_WEIGHT_DECAY = 0.01
_CLIP_NORM = 1.0
_STATE_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")


def learning_rate(step: int, num_steps: int, peak: float = PEAK_LR) -> float:
    """Learning rate of a step: a short warm-up, a plateau, then linear decay to zero.

    Args:
        step: Number of the step, from 0.
        num_steps: Steps of the whole run.
        peak: Learning rate of the plateau.

    Returns:
        The learning rate of both optimizers.
    """
    warm_up = max(1, math.ceil(_WARM_UP * num_steps))
    rising = (step + 1) / warm_up
    falling = (num_steps - step) / (num_steps * (1 - _DECAY_FROM))
    return peak * min(1.0, rising, falling)


class ReasonerOptimizer:
    """Updates float32 parameters with Muon and AdamW; its state can be saved and restored."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], num_steps: int, peak: float = PEAK_LR
    ) -> None:
        """Assign each parameter to an optimizer.

        Args:
            parameters: The float32 parameters by name.
            num_steps: Steps of the whole run.
            peak: Learning rate of the plateau.
        """
        self._parameters = dict(parameters)
        self._num_steps = num_steps
        self._peak = peak
        matrices = [p for name, p in parameters.items() if _is_matrix(name, p)]
        others = [p for name, p in parameters.items() if not _is_matrix(name, p)]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=peak,
                weight_decay=_MUON_WEIGHT_DECAY,
                adjust_lr_fn="match_rms_adamw",
            )
            self._optimizers.append(muon)
        adamw = torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
        self._optimizers.append(adamw)

    def step(self, step: int) -> float:
        """Clip the gradients and update the parameters.

        Args:
            step: Number of the step, from 0.

        Returns:
            The learning rate of the step.
        """
        nn.utils.clip_grad_norm_(self._parameters.values(), _CLIP_NORM)
        rate = learning_rate(step, self._num_steps, self._peak)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return rate

    def state(self) -> dict[str, Tensor]:
        """The running averages of both optimizers, by ``<key>.<parameter name>``."""
        tensors = {}
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{key}.{name}"] = value
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state returned by `state`.

        Args:
            tensors: The saved running averages.
        """
        for name, parameter in self._parameters.items():
            optimizer = self._optimizers[0 if _is_matrix(name, parameter) else -1]
            found = {key: tensors.get(f"{key}.{name}") for key in _STATE_KEYS}
            optimizer.state[parameter] = {
                # Steps are counted on the CPU.
                key: value.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, value in found.items()
                if value is not None
            }


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lora" not in name
