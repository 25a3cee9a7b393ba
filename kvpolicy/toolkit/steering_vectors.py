"""Steering vectors: directions to add to hidden states, and how they were made.

A file holds one vector for each of several layers of one model: safetensors, with tensors
``layer.01``, ``layer.02``, ..., and one entry of metadata, ``kvpolicy``, which is JSON::

    {"format": 1, "default_layer": 1, "separation": {"1": 2.1}, "calibration": {...}}

An entry point of the group ``kvpolicy.vectors`` maps a name to a package whose folder holds
``NAME.safetensors``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import SteeringError, shown
from kvpolicy.toolkit.paragraphs import PARAGRAPH
from kvpolicy.toolkit.tensor_files import TensorFiles

GROUP = "kvpolicy.vectors"
SIGN = "execution - non_execution"

FILES = TensorFiles(
    group=GROUP,
    what="steering vector file",
    name="steering vector",
    made_by="`kvpolicy steer calibrate`",
    pickle_hint=(
        "SEAL writes them so; convert it where you trust it: torch.load(FILE, "
        "weights_only=True), change the sign (SEAL stores non-execution - execution), "
        "kvpolicy.toolkit.save_steering_vectors"
    ),
    error=SteeringError,
)

_FORMAT = 1
_KEY = "kvpolicy"


@attrs.frozen(kw_only=True)
class Calibration:
    """How steering vectors were made.

    Attributes:
        model: The model, as the user named it.
        fingerprint: Hash of its configuration and weights; empty if not known.
        task: Name of the task.
        split: Split of the task.
        seed: Seed that chose the examples.
        num_right: Number of traces with a correct answer.
        num_wrong: Number of the other traces.
        num_thoughts: Number of thoughts of each kind.
        rules: Name of the rules that classified the thoughts.
        rules_digest: Hash of these rules.
        delimiter: Text inside the tokens at which thoughts began, where a policy is to steer.
        sign: Which mean was subtracted from which.
        version: Version of kvpolicy.
    """

    model: str
    fingerprint: str = ""
    task: str = ""
    split: str = ""
    seed: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_thoughts: Mapping[str, int] = attrs.field(factory=dict)
    rules: str = ""
    rules_digest: str = ""
    delimiter: str = PARAGRAPH
    sign: str = SIGN
    version: str = ""


@attrs.frozen(eq=False, kw_only=True)
class SteeringVector:
    """A direction in the residual stream that enters one decoder layer.

    Attributes:
        vector: The direction, ``[M]``, fp32: mean of the states before execution thoughts
            minus mean of those before non-execution thoughts.
        layer: Decoder layer whose input it is added to, from 0: ``hidden_states[layer]`` of
            transformers.
        calibration: How it was made.
        separation: Distance of the two means divided by the pooled standard deviation along
            the vector, on the thoughts it was made from; ``None`` if not known.
    """

    vector: Tensor
    layer: int
    calibration: Calibration
    separation: float | None = None
    _copies: dict[torch.device, Tensor] = attrs.field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        problem = _problem(self.vector, self.layer)
        if problem is not None:
            msg = f"steering vector of {self.calibration.model}, layer {self.layer}: {problem}"
            raise SteeringError(msg)

    def entering(self, hidden_states: Tensor) -> Tensor:
        """The vector on the device of some hidden states.

        Args:
            hidden_states: ``[B, M]``.

        Returns:
            The vector, ``[M]``, fp32. The copy for each device is kept.

        Raises:
            SteeringError: The hidden states have another size.
        """
        size, device = hidden_states.shape[-1], hidden_states.device
        if size != len(self.vector):
            msg = (
                f"the steering vector has {len(self.vector)} numbers and the model's hidden "
                f"states {size}: it was made for {self.calibration.model}; make one for this "
                "model with `kvpolicy steer calibrate`"
            )
            raise SteeringError(msg)
        if device not in self._copies:
            self._copies[device] = self.vector.to(device)
        return self._copies[device]


def save_steering_vectors(
    path: str | Path, vectors: Sequence[SteeringVector], *, default_layer: int | None = None
) -> None:
    """Write vectors of several layers into one file, atomically.

    Args:
        path: The file; its name should end in ``.safetensors``.
        vectors: One for each layer, all of one calibration.
        default_layer: Layer to use by default; not needed for a single vector.

    Raises:
        SteeringError: There is no vector, there are two for one layer, or none for the default
            layer.
        OutputError: The file cannot be written.
    """
    for vector in vectors:
        if not isinstance(vector, SteeringVector):
            msg = f"{shown(vector)} is not a steering vector; make one with SteeringVector"
            raise SteeringError(msg)
    layers = [vector.layer for vector in vectors]
    if not layers or len(set(layers)) < len(layers) or default_layer not in (None, *layers):
        msg = (
            f"steering vectors of layers {layers} with default layer {default_layer} make no "
            "file: at least one vector is needed, one for a layer, the default among them"
        )
        raise SteeringError(msg)
    described = {
        "format": _FORMAT,
        "default_layer": default_layer,
        "separation": {vector.layer: vector.separation for vector in vectors},
        "calibration": attrs.asdict(vectors[0].calibration),
    }
    tensors = {f"layer.{vector.layer:02}": vector.vector.contiguous() for vector in vectors}
    FILES.write(Path(path), tensors, {_KEY: described})


def load_steering_vector(name_or_path: str | Path, layer: int | None = None) -> SteeringVector:
    """Read the vector of one layer.

    Args:
        name_or_path: Name of an installed file, or a path.
        layer: The layer; by default the file's default or only one.

    Raises:
        SteeringError: There is no such file, it does not hold steering vectors, or it has no
            valid vector for the layer.
    """
    vectors, default = load_steering_vectors(name_or_path)
    layer = default if layer is None else layer
    found = [vector for vector in vectors if vector.layer == layer]
    if not found:
        layers = ", ".join(str(vector.layer) for vector in vectors)
        problem = "names no layer to use by default" if layer is None else f"has no layer {layer}"
        msg = f"steering vector file '{name_or_path}' {problem}; choose one of its layers: {layers}"
        raise SteeringError(msg)
    return found[0]


def load_steering_vectors(name_or_path: str | Path) -> tuple[list[SteeringVector], int | None]:
    """Read all vectors of a file.

    Args:
        name_or_path: Name of an installed file, or a path.

    Returns:
        The vectors sorted by layer, and the default layer, if there is one.

    Raises:
        SteeringError: There is no such file, or it does not hold steering vectors.
    """
    tensors, metadata = FILES.read(name_or_path)
    return _structure(tensors, metadata, FILES.called(name_or_path))


def with_hash(reference: Any) -> Any:
    """Add the hash of a file of vectors to its name: the converter of a knob that names one.

    Results are stored under the hash of their plan. With the hash of the vectors in the plan,
    results with vectors that were calibrated again do not pass for results with the old ones.

    Args:
        reference: An installed name or a path, with or without ``#HASH`` behind it. What is no
            text is returned as it is, for the knob's validator.

    Returns:
        The name or path with ``#HASH``.

    Raises:
        SteeringError: There is no such file, or its hash differs from the given one.
    """
    return FILES.with_hash(reference)


def load_hashed(reference: str, layer: int | None) -> SteeringVector:
    """Read the vector of one layer from a file named with its hash, as by `with_hash`."""
    return load_steering_vector(reference.partition("#")[0], layer)


def _structure(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], what: str
) -> tuple[list[SteeringVector], int | None]:
    try:
        described: dict[str, Any] = metadata[_KEY]
        if described["format"] != _FORMAT:
            raise ValueError
        calibration = Calibration(**described["calibration"])
        layers = {int(re.fullmatch(r"layer\.(\d+)", key)[1]): key for key in tensors}  # type: ignore[index]
        separation, default = described["separation"], described["default_layer"]
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"{what} was not written by this version of kvpolicy, so that its layers and its "
            "sign are not known; make it with `kvpolicy steer calibrate`, or with "
            "kvpolicy.toolkit.save_steering_vectors"
        )
        raise SteeringError(msg) from error
    vectors = []
    for layer, key in sorted(layers.items()):
        problem = _problem(tensors[key], layer)
        if problem is not None:
            msg = f"{what}, layer {layer}: {problem}"
            raise SteeringError(msg)
        vectors.append(
            SteeringVector(
                vector=tensors[key],
                layer=layer,
                calibration=calibration,
                separation=separation.get(str(layer)),
            )
        )
    return vectors, vectors[0].layer if len(vectors) == 1 else default


def _problem(vector: Tensor, layer: int) -> str | None:
    if vector.ndim != 1 or vector.dtype != torch.float32 or not vector.numel():
        kind = str(vector.dtype).removeprefix("torch.")
        return f"it is {kind} of shape {list(vector.shape)}; expected float32 of shape [M]"
    if not vector.isfinite().all():
        return f"{int((~vector.isfinite()).sum())} of its numbers are NaN or infinite"
    return None if layer >= 0 else "layers are counted from 0"
