"""Packed weights: linear layers on a CPU with weights in a form that is multiplied faster.

A decode step multiplies a few rows with every weight of the model, and takes little more than
reading the weights if they are in a form for that: reordered once, or rounded to fewer bits too
(`kvpolicy.model.weight_forms`). Linear layers of one module that are given the same input are one
product, computed at the first call with that input, and each takes its columns.

Where weights are only reordered, products differ from those of plain weights by rounding: by about
3e-6 for weights and inputs of size 1. A greedy token may differ where two logits are nearly equal.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import nan
from typing import Any, NoReturn, Self, get_args

import attrs
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.model.twin import Copies
from kvpolicy.model.weight_forms import FORMS, CpuWeights, Packed, Weights
from kvpolicy.model.wrappers import has_adapters, unwrapped

# Linear layers of one module that models of transformers give the same input, by name.
_SHARING_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Smaller products stay plain: a call of oneDNN takes 10 microseconds longer to start, which they
# do not make up for, least of all if the weights stay in the processor's cache.
MIN_BYTES = 2**19


def packed_model(
    model: PreTrainedModel, *, cpu_weights: CpuWeights = "packed", release: bool = False
) -> PreTrainedModel:
    """A model that computes what another one does, with packed weights in its linear layers.

    It is for inference on the CPU: for `kvpolicy.Engine`, ``generate`` and plain calls alike. It
    has the modules of the other one except for linear layers and what contains them. The linear
    weights are read now; what changes in them later has no effect on it. Products of less than
    half a MiB of weights stay plain, because packing makes them slower.

    Args:
        model: The model, which is left as it is unless ``release`` is given.
        cpu_weights: The form: ``"packed"`` changes no weight, ``"bf16"`` and ``"int8"`` round them.
        release: Free the plain weights that nothing else uses, each as soon as it is packed. The
            model given cannot compute any more then, nor can its copies; drop it. A head that is
            tied to the embedding keeps its weight, which the embedding reads.

    Returns:
        The packed model; the model given if it has this form already, or all its products are
        small.

    Raises:
        KVPolicyError: There is no such form.
        ModelError: The weights cannot be packed here, or are packed in another form.
    """
    model = unwrapped(model)
    if not wants_packing(cpu_weights):
        return model
    form = FORMS[cpu_weights]
    present = _packed_layers(model)
    if present and present[0].product.form is form:
        return model
    problem = (
        "they are in another form already; give the model that they were packed from"
        if present
        else _problem(model, form)
    )
    if problem is not None:
        msg = f"the weights of model {type(model).__name__} cannot be packed: {problem}"
        raise ModelError(msg)
    num_uses = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    packed: dict[int, nn.Module] = {}
    for layers in _products(model):
        if sum(layer.weight.nbytes for layer in layers) < MIN_BYTES:
            continue
        product = Product(layers, form)
        for part, layer in enumerate(layers):
            packed[id(layer)] = PackedLinear.of(layer, product, part)
            if release and num_uses[id(layer.weight)] == 1:
                # Whoever reads it gets NaN, and not numbers that seem right.
                placeholder = torch.tensor(nan, dtype=layer.weight.dtype)
                layer.weight.data = placeholder.expand(layer.weight.shape)
    return Copies(model, None, packed).twin if packed else model


def wants_packing(cpu_weights: CpuWeights) -> bool:
    """Whether weights are to be packed.

    Raises:
        KVPolicyError: There is no such form.
    """
    if cpu_weights not in get_args(CpuWeights):
        *most, last = map(repr, get_args(CpuWeights))
        msg = f"cpu_weights was given as {cpu_weights!r:.60}; choose {', '.join(most)} or {last}"
        raise KVPolicyError(msg)
    return cpu_weights != "plain"


@attrs.frozen
class PackedWeights:
    """What packing has done to the memory of a model.

    Attributes:
        num_layers: Linear layers with packed weights.
        num_products: Products that compute them.
        packed_bytes: Bytes of the packed weights.
        released_bytes: Bytes of the plain weights of these layers that were freed.
        form: The form of the packed weights; ``"plain"``: there are none.
    """

    num_layers: int
    num_products: int
    packed_bytes: int
    released_bytes: int
    form: CpuWeights = "plain"


def packed_weights(model: nn.Module) -> PackedWeights:
    """The packed weights of a model, of which it may have none."""
    layers = _packed_layers(model)
    products = {id(one.product): one.product for one in layers}
    form = layers[0].product.form if layers else None
    return PackedWeights(
        num_layers=len(layers),
        num_products=len(products),
        packed_bytes=sum(one.num_bytes for one in products.values()),
        released_bytes=sum(one.weight.nbytes for one in layers if one.is_released),
        form=next((name for name, one in FORMS.items() if one is form), "plain"),
    )


class Product:
    """The product of an input with the packed weights of linear layers.

    Attributes:
        form: Their form.
        num_bytes: Bytes of the packed weights.
    """

    def __init__(self, layers: Sequence[nn.Linear], form: type[Weights] = Packed) -> None:
        """Pack the weights of linear layers with equal inputs, which are left as they are."""
        self.form = form
        with torch.no_grad():
            self._weights = form(torch.cat([layer.weight for layer in layers]))
            self._bias = _joint_bias(layers)
        self._sizes = [layer.out_features for layer in layers]
        # The last input, and the columns of each layer until it has taken them.
        self._last: tuple[Tensor, list[Tensor | None]] | None = None
        self.num_bytes = self._weights.num_bytes

    def columns(self, states: Tensor, part: int) -> Tensor:
        """The result of one layer, ``[..., N]``; a view if several layers share the product.

        Each layer takes its columns once. So a tensor that was changed in place and is given
        again, as in a graph with fixed addresses, is multiplied again.

        Args:
            states: Input of the layer, ``[..., K]``.
            part: Number of the layer.
        """
        if len(self._sizes) == 1:
            return self._multiply(states)
        last = self._last  # read once: another thread may replace it by its own
        columns = last[1][part] if last is not None and last[0] is states else None
        if last is None or columns is None:
            last = (states, list(self._multiply(states).split(self._sizes, dim=-1)))
            self._last = last
            columns = last[1][part]
            assert columns is not None, "nobody has taken them yet"
        last[1][part] = None
        if all(one is None for one in last[1]):
            self._last = None
        return columns

    def plain(self, part: int) -> Tensor:
        """A copy of the weights of one layer, ``[N, K]``: the numbers that are multiplied."""
        return self._weights.plain().split(self._sizes)[part].clone()

    def _multiply(self, states: Tensor) -> Tensor:
        return self._weights.multiply(states, self._bias)

    def __deepcopy__(self, _: Any) -> Self:
        return self  # torch copies no packed tensors, and these never change


class PackedLinear(nn.Linear):
    """A linear layer with packed weights, and with the hooks and parameters of a plain one.

    Attributes:
        product: Computes it.
        part: Its number in the product.
    """

    product: Product
    part: int

    @classmethod
    def of(cls, layer: nn.Linear, product: Product, part: int) -> Self:
        """The packed form of a plain layer, which is left as it is."""
        packed = object.__new__(cls)
        vars(packed).update(vars(layer), product=product, part=part)
        return packed

    @property
    def is_released(self) -> bool:
        """Whether the plain weight was freed."""
        return not any(self.weight.stride())

    def multiplied(self) -> Tensor:
        """The weights that it is computed with, ``[N, K]``, which may be rounded."""
        is_kept = self.product.form is Packed and not self.is_released
        return self.weight.detach() if is_kept else self.product.plain(self.part)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer, ``[..., K]`` to ``[..., N]``."""
        return self.product.columns(input, self.part)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_released or self.product.form is not Packed:
            destination[f"{prefix}weight"] = self.product.plain(self.part)

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        msg = (
            "the weights of this model are packed for the CPU and cannot be moved or converted; do "
            "that to the model that they were packed from, and pack it again"
        )
        raise ModelError(msg)


def _packed_layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def _is_plain(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer of torch, with a forward that nothing has replaced."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def _products(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers of a model, those together that share their input."""
    seen: set[int] = set()
    for module in model.modules():
        layers: dict[str, Any] = {
            name: child
            for name, child in module._modules.items()
            if _is_plain(child) and id(child) not in seen
        }
        seen.update(map(id, layers.values()))
        for names in _SHARING_INPUT:
            together = [layers.pop(name) for name in names if name in layers]
            if len({(one.in_features, one.weight.dtype) for one in together}) == 1:
                yield together
            else:
                yield from ([one] for one in together)
        yield from ([one] for one in layers.values())


def _joint_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of layers in a row, zero for a layer without; ``None`` if none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    zeros = layers[0].weight.new_zeros
    return torch.cat(
        [zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    )


def _problem(model: PreTrainedModel, form: type[Weights]) -> str | None:
    """Why the weights of a model cannot be packed in a form; ``None`` if they can."""
    layers: list[Any] = [module for module in model.modules() if _is_plain(module)]
    devices = sorted({weight.device.type for weight in model.parameters()} - {"cpu"})
    if devices:
        return f"some are on the device '{devices[0]}'; load it on the CPU, or leave it plain"
    if has_adapters(model):
        return "it has adapters, which change them; merge them first, by merge_and_unload()"
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "several processes share them; load the model in one, or leave it plain"
    if getattr(model, "is_quantized", False) or any(
        type(layer.weight) is not nn.Parameter for layer in layers
    ):
        return "they are quantised; load the model in float32 or bfloat16, or leave it plain"
    if not layers:
        return "it has no linear layers of torch; leave it plain"
    problems = (form.problem(dtype) for dtype in {layer.weight.dtype for layer in layers})
    return next(filter(None, problems), None)
