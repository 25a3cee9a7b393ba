"""Steering vectors: directions to add to hidden states, with where they come from.

A file holds one vector for each of several layers of one model: safetensors, with tensors
``layer.01``, ``layer.02``, ..., and one entry of metadata, ``kvpolicy``, which is JSON::

    {"format": 1, "default_layer": 1, "separation": {"1": 2.1}, "calibration": {...}}

An entry point of the group ``kvpolicy.vectors`` gives a name to a package whose folder holds
``NAME.safetensors``.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from kvpolicy.errors import SteeringError
from kvpolicy.files import atomic_write
from kvpolicy.hooks.bundled import bundled_file
from kvpolicy.toolkit.calibration import Calibration

GROUP = "kvpolicy.vectors"

_FORMAT = 1
_KEY = "kvpolicy"
_SUFFIX = ".safetensors"
_PICKLES = (b"\x80", b"PK")  # torch.save, before and since it writes zip archives


@attrs.frozen(eq=False, kw_only=True)
class SteeringVector:
    """A direction in the residual stream that enters one decoder layer.

    Attributes:
        vector: The direction, ``[M]``, fp32: mean of the states before execution thoughts
            less mean of those before non-execution thoughts.
        layer: Decoder layer whose input it is, from 0: ``hidden_states[layer]`` of
            transformers.
        calibration: Where it comes from.
        separation: Distance of the two means over the pooled standard deviation along the
            vector, on the thoughts it was made of; ``None`` if not known.
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
        """The vector where some hidden states are, if it is of their size.

        Args:
            hidden_states: ``[B, M]``.

        Returns:
            The vector, ``[M]``, fp32; copied to a device once.

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
    """Write vectors of several layers into one file, which is there whole or not at all.

    Args:
        path: The file; its name should end in ``.safetensors``.
        vectors: One for each layer, all of one calibration.
        default_layer: Layer to take where none is asked for; not needed if there is but one.

    Raises:
        SteeringError: Two vectors are of one layer, or the default layer is not among them.
        OutputError: The file cannot be written.
    """
    layers = [one.layer for one in vectors]
    if not layers or len(set(layers)) < len(layers) or default_layer not in (None, *layers):
        msg = (
            f"steering vectors of layers {layers} with default layer {default_layer} make no "
            "file: at least one vector is needed, one for a layer, the default among them"
        )
        raise SteeringError(msg)
    described = {
        "format": _FORMAT,
        "default_layer": default_layer,
        "separation": {one.layer: one.separation for one in vectors},
        "calibration": attrs.asdict(vectors[0].calibration),
    }
    tensors = {f"layer.{one.layer:02}": one.vector.contiguous() for one in vectors}
    # One entry only: safetensors writes several in no particular order.
    content = save(tensors, {_KEY: json.dumps(described, sort_keys=True)})
    atomic_write(Path(path), content)


def load_steering_vector(name_or_path: str | Path, layer: int | None = None) -> SteeringVector:
    """Read the vector of one layer.

    Args:
        name_or_path: Name of a bundled file, or path of one.
        layer: Which layer; the file's default or only one if not given.

    Raises:
        SteeringError: There is no such file, it is no file of vectors, or it has no vector, or
            a broken one, for the layer.
    """
    vectors, default = load_steering_vectors(name_or_path)
    layer = default if layer is None else layer
    found = [one for one in vectors if one.layer == layer]
    if not found:
        there = ", ".join(str(one.layer) for one in vectors)
        asked = "names no layer to use by default" if layer is None else f"has no layer {layer}"
        msg = f"steering vector file '{name_or_path}' {asked}; ask for one of its layers: {there}"
        raise SteeringError(msg)
    return found[0]


def load_steering_vectors(name_or_path: str | Path) -> tuple[list[SteeringVector], int | None]:
    """Read all vectors of a file.

    Args:
        name_or_path: Name of a bundled file, or path of one.

    Returns:
        The vectors by rising layer, and the layer to use by default, if there is one.

    Raises:
        SteeringError: There is no such file, or it is no file of vectors.
    """
    path = vector_file(name_or_path)
    what = f"steering vector file '{name_or_path}'"
    try:
        with path.open("rb") as file:
            if file.read(2).startswith(_PICKLES):
                raise SteeringError(_refuse_pickle(what))
        with safetensors.safe_open(path, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
    except OSError as error:
        msg = f"{what} cannot be read: {error.strerror or error}"
        raise SteeringError(msg) from error
    except safetensors.SafetensorError as error:
        msg = f"{what} is not safetensors ({error}); `kvpolicy steer calibrate` writes one"
        raise SteeringError(msg) from error
    return _structure(tensors, metadata, what)


def vector_file(name_or_path: str | Path) -> Path:
    """Where a file of vectors is that is named, or given as a path."""
    path = Path(name_or_path)
    if path.suffix or len(path.parts) > 1 or path.is_file():
        return path
    return bundled_file(GROUP, str(path), suffix=_SUFFIX, what="steering vector")


def _structure(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], what: str
) -> tuple[list[SteeringVector], int | None]:
    try:
        described: dict[str, Any] = json.loads(metadata[_KEY])
        if described["format"] != _FORMAT:
            raise ValueError
        calibration = Calibration(**described["calibration"])
        layers = {int(re.fullmatch(r"layer\.(\d+)", key)[1]): key for key in tensors}  # type: ignore[index]
        separation, default = described["separation"], described["default_layer"]
    except (KeyError, TypeError, ValueError) as error:
        msg = (
            f"{what} was not written by this version of kvpolicy, so that its layers and its "
            "sign are not known; make it with `kvpolicy steer calibrate`, or with "
            "kvpolicy.toolkit.steering_vectors.save_steering_vectors"
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
        return f"it is {kind} of shape {list(vector.shape)}; float32 of shape [M] is wanted"
    if not vector.isfinite().all():
        return f"{int((~vector.isfinite()).sum())} of its numbers are NaN or infinite"
    return None if layer >= 0 else "layers are counted from 0"


def _refuse_pickle(what: str) -> str:
    return (
        f"{what} is a pickle, as SEAL writes them, and is refused, because reading one may run "
        "code; convert it where you trust it: torch.load(FILE, weights_only=True), change the "
        "sign (SEAL stores non-execution - execution), save_steering_vectors"
    )
