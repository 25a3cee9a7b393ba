"""Gates: small networks that say, when a token is created, how fast its row loses worth.

A file holds the gates of one model: safetensors, with the authors' names of tensors,
``model.layers.3.self_attn.retention_gate.linear1.weight``. Whatever stands before ``layers`` and
between the layer and the last names does not matter; tensors without a layer are a gate for every
layer. Of the metadata, the key ``kvpolicy`` is JSON::

    {"format": 1, "retention_gate": "rg", "hidden_act": "silu", "training": {...}}

Files without it, such as released weights that were saved as safetensors, are read as well; they
may have ``retention_gate`` and ``hidden_act`` as entries of their own. An entry point of the group
``kvpolicy.gates`` maps a name to a package whose folder holds ``NAME.safetensors``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import KVPolicyError
from kvpolicy.toolkit import TensorFiles

Form = Literal["rg", "rg2", "rg3"]
FORMS: tuple[Form, ...] = get_args(Form)

INTERMEDIATE_SIZE = 512  # of the released gates
INITIALIZER_RANGE = 0.02

FILES = TensorFiles(
    group="kvpolicy.gates",
    what="gate file",
    name="file of gates",
    made_by="`kvpolicy trimkv train`",
    pickle_hint=(
        "the authors release their weights so; convert it where you trust it: "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
    ),
)

_FORMAT = 1
_KEY = "kvpolicy"
_DEFAULT_ACT = "silu"  # that of all models whose gates were released
_TWO_LINEAR = ("linear1.weight", "linear1.bias", "linear2.weight", "bias")
_GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "bias")
_NAMES: dict[Form, tuple[str, ...]] = {"rg": _TWO_LINEAR, "rg2": _TWO_LINEAR, "rg3": _GATED}


@attrs.frozen(eq=False, kw_only=True)
class Gate:
    """The gate of one layer.

    Attributes:
        form: ``"rg"`` reads the attention's input, ``[N, M]``, by two linear layers; ``"rg2"`` and
            ``"rg3"`` read keys after RoPE and values, ``[N, H_kv, 2 D]``, head by head, ``"rg3"``
            by a gated MLP.
        hidden_act: Name of the activation, as transformers knows it.
        tensors: The weights by the authors' names, fp32.
    """

    form: Form
    hidden_act: str
    tensors: Mapping[str, Tensor]

    @property
    def num_inputs(self) -> int:
        """Numbers of a token that the gate reads."""
        return self.tensors[_NAMES[self.form][0]].shape[1]

    @property
    def num_heads(self) -> int:
        """KV heads that it rates."""
        return len(self.tensors["bias"])

    @property
    def reads_states(self) -> bool:
        """Whether it reads the attention's input, and not keys and values."""
        return self.form == "rg"

    def log_beta(self, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The retention of tokens.

        In fp32 where the model has less precision: near 18, where the paper's gates begin, two
        neighbouring bfloat16 numbers are 0.125 apart, and ``log beta`` is about ``-1.5e-8``.

        Args:
            states: Input of the layer's attention, ``[N, M]``.
            keys: Keys after RoPE, ``[N, H_kv, D]``.
            values: Values, ``[N, H_kv, V]``.

        Returns:
            ``log beta``, ``[N, H_kv]``, fp32 or more, below 0.
        """
        inputs = states if self.reads_states else torch.cat([keys, values], dim=-1).flatten(1)
        return self.rate(inputs)

    def rate(self, inputs: Tensor) -> Tensor:
        """The retention of tokens from what the gate reads, ``[..., I]``: ``[..., H_kv]``."""
        x = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        act, w = _activation(self.hidden_act), {n: t.to(x.dtype) for n, t in self.tensors.items()}
        if self.form == "rg3":
            hidden = act(F.linear(x, w["gate_proj.weight"])) * F.linear(x, w["up_proj.weight"])
            u = F.linear(hidden, w["down_proj.weight"])
        else:
            hidden = act(F.linear(x, w["linear1.weight"], w["linear1.bias"]))
            u = F.linear(hidden, w["linear2.weight"])
        return F.logsigmoid(u + w["bias"])

    def to(self, device: torch.device) -> "Gate":
        """The gate on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return attrs.evolve(self, tensors=moved)


@attrs.frozen(eq=False, kw_only=True)
class Gates:
    """The gates of a model.

    Attributes:
        by_layer: A gate for each layer by its number, counted from 0; under ``None`` one for all
            other layers.
        training: How they were trained, plain data; empty if not known.
    """

    by_layer: Mapping[int | None, Gate]
    training: Mapping[str, Any] = attrs.field(factory=dict)

    def of_layer(self, layer_idx: int) -> Gate | None:
        """The gate of a layer, if there is one."""
        return self.by_layer.get(layer_idx, self.by_layer.get(None))

    @property
    def num_numbers(self) -> int:
        """Numbers in all tensors."""
        return sum(t.numel() for gate in self.by_layer.values() for t in gate.tensors.values())

    def save(self, path: Path) -> None:
        """Write a file atomically; equal gates give equal bytes.

        Raises:
            OutputError: It cannot be written.
        """
        first = next(iter(self.by_layer.values()))
        described = {
            "format": _FORMAT,
            "retention_gate": first.form,
            "hidden_act": first.hidden_act,
            "training": dict(self.training),
        }
        named = {
            _tensor_name(layer, name): tensor.detach().cpu().contiguous()
            for layer, gate in self.by_layer.items()
            for name, tensor in gate.tensors.items()
        }
        FILES.write(path, named, {_KEY: described})


def new_gate(
    form: Form,
    *,
    num_inputs: int,
    num_heads: int,
    intermediate_size: int = INTERMEDIATE_SIZE,
    hidden_act: str = _DEFAULT_ACT,
    bias: float,
    generator: torch.Generator,
) -> Gate:
    """A gate as training begins with: normal weights, and a bias that makes tokens stay.

    Args:
        form: Its form.
        num_inputs: Numbers of a token that it reads.
        num_heads: KV heads.
        intermediate_size: Width of its hidden layer.
        hidden_act: Name of the activation.
        bias: What the bias of each head begins with.
        generator: Draws the weights, on the CPU.
    """
    first, last = (intermediate_size, num_inputs), (num_heads, intermediate_size)
    shapes = {
        "linear1.weight": first,
        "gate_proj.weight": first,
        "up_proj.weight": first,
        "linear2.weight": last,
        "down_proj.weight": last,
    }
    tensors = {}
    for name in _NAMES[form]:
        if name == "bias":
            tensors[name] = torch.full((num_heads,), float(bias))
        elif name == "linear1.bias":
            tensors[name] = torch.zeros(intermediate_size)
        else:
            tensors[name] = torch.randn(shapes[name], generator=generator) * INITIALIZER_RANGE
    return Gate(form=form, hidden_act=hidden_act, tensors=tensors)


def load_gates(reference: str, *, form: Form | None = None, hidden_act: str | None = None) -> Gates:
    """Read a file of gates.

    Args:
        reference: Installed name or path, with or without ``#HASH`` behind it.
        form: Form of the gates; by default that of the file, and if it names none, ``"rg"`` or
            ``"rg3"``, whichever has tensors of these names.
        hidden_act: Activation; by default that of the file, and if it names none, ``"silu"``.

    Raises:
        KVPolicyError: There is no such file, or it does not hold gates.
    """
    tensors, metadata = FILES.read(reference)
    what = FILES.called(reference)
    described = _described(metadata, what)
    by_layer: dict[int | None, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, name = _split(key, what)
        if name in by_layer.setdefault(layer, {}):
            msg = f"{what} has two tensors '{name}' for layer {layer}; give the gates of one model"
            raise KVPolicyError(msg)
        by_layer[layer][name] = tensor.float()
    if not by_layer:
        msg = f"{what} holds no tensors; {FILES.made_by} writes one"
        raise KVPolicyError(msg)
    named = form or described.get("retention_gate")
    act = hidden_act or described.get("hidden_act") or _DEFAULT_ACT
    _check_act(act, what)
    gates = {layer: _gate(by_layer[layer], named, act, layer, what) for layer in by_layer}
    return Gates(by_layer=gates, training=described.get("training", {}))


def _gate(
    tensors: dict[str, Tensor], named: str | None, act: str, layer: int | None, what: str
) -> Gate:
    form = named or ("rg3" if "gate_proj.weight" in tensors else "rg")
    where = what if layer is None else f"{what}, layer {layer}"
    if form not in FORMS:
        msg = f"{what} has gates of the form {form!r}; choose one of {', '.join(FORMS)}"
        raise KVPolicyError(msg)
    missing = [name for name in _NAMES[form] if name not in tensors]
    if missing or len(tensors) > len(_NAMES[form]):
        msg = (
            f"{where} has the tensors {', '.join(sorted(tensors))}; a gate of the form '{form}' "
            f"has {', '.join(_NAMES[form])}"
        )
        raise KVPolicyError(msg)
    gate = Gate(form=form, hidden_act=act, tensors=tensors)
    problem = _shape_problem(gate)
    if problem is not None:
        msg = f"{where}: {problem}"
        raise KVPolicyError(msg)
    return gate


def _shape_problem(gate: Gate) -> str | None:
    first, *_ = _NAMES[gate.form]
    weight, bias = gate.tensors[first], gate.tensors["bias"]
    if weight.dim() == 2 and bias.dim() == 1:
        width, num_inputs = weight.shape
        shapes = {
            name: (len(bias), width) if name in ("linear2.weight", "down_proj.weight")
            else (width,) if name == "linear1.bias"
            else (len(bias),) if name == "bias"
            else (width, num_inputs)
            for name in _NAMES[gate.form]
        }  # fmt: skip
        wrong = [n for n, shape in shapes.items() if tuple(gate.tensors[n].shape) != shape]
    else:
        wrong = [first, "bias"]
    if wrong:
        found = ", ".join(f"{name} {list(gate.tensors[name].shape)}" for name in wrong)
        return f"shapes of tensors do not fit together ({found}); give the gates of one model"
    broken = [name for name, tensor in gate.tensors.items() if not tensor.isfinite().all()]
    if broken:
        return f"{broken[0]} has numbers that are NaN or infinite; train the gates again"
    return None


def _described(metadata: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """What the file says of its gates."""
    described = metadata.get(_KEY)
    if described is None:
        return metadata  # of others, who may have given single entries
    if not isinstance(described, dict) or described.get("format") != _FORMAT:
        msg = f"{what} was not written by this version of kvpolicy; train the gates again"
        raise KVPolicyError(msg)
    return described


def _split(key: str, what: str) -> tuple[int | None, str]:
    """Layer and last names of a tensor."""
    found = re.fullmatch(
        r"(?:.*?\.)?layers\.(\d+)\.(?:.*?\.)?((?:linear[12]|(?:gate|up|down)_proj)\.(?:weight|bias)|bias)",
        key,
    )
    if found is not None:
        return int(found[1]), found[2]
    known = {name for names in _NAMES.values() for name in names}
    if key in known:
        return None, key
    msg = (
        f"{what} has a tensor {key!r:.80}, which no gate has; expected names such as "
        "'model.layers.0.self_attn.retention_gate.linear1.weight'"
    )
    raise KVPolicyError(msg)


def _tensor_name(layer: int | None, name: str) -> str:
    return name if layer is None else f"model.layers.{layer}.self_attn.retention_gate.{name}"


def _check_act(act: Any, what: str) -> None:
    from transformers.activations import ACT2FN

    if act not in ACT2FN:
        msg = f"{what} has the activation {act!r:.40}, which transformers does not know; try 'silu'"
        raise KVPolicyError(msg)


def _activation(name: str) -> Any:
    if name == "silu":
        return F.silu
    from transformers.activations import ACT2FN

    return ACT2FN[name]
