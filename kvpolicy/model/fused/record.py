"""Recording: the operators that a function of tensors runs, as a graph that can be run again.

What is recorded is what a CUDA graph would hold: a sequence of operators on tensors at fixed
addresses. Unlike a CUDA graph it says which operators these are, so that some can be replaced
before the step is captured. It holds for the addresses that it was recorded with; and for the
shapes, unless `kvpolicy.model.fused.extents` has told which of them are those of its inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from kvpolicy.opaque import witnessed

_ALLOCATES = (
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
)

_CASTS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.other,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.type_as.default,
    torch.ops.aten._to_copy.default,
}


class NotRecordableError(Exception):
    """A function does what operators do not tell of; users read why in `RunReport.path`."""


@attrs.frozen
class Layout:
    """What the result of an operator is like.

    Attributes:
        shape: Its sizes.
        dtype: Its precision.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


def layout(node: Node) -> Layout | None:
    """What a node gives, if that is one tensor."""
    found: Layout | None = node.meta.get("layout")
    return found


def is_view(node: Node) -> bool:
    """Whether an operator computes nothing: it gives a view, or memory."""
    found: bool = node.meta.get("is_view", False)
    return found


def viewed(node: Node) -> Node | None:
    """What a node is a view of; ``None``: it has memory of its own."""
    if is_view(node):
        return next(iter(node.all_input_nodes), None)
    if not node.meta.get("is_part", False):
        return None
    return node.all_input_nodes[0].all_input_nodes[0]  # such as of what was split


def location(node: Node) -> tuple[int, tuple[int, ...]] | None:
    """Where the numbers of a node's tensor were in its memory: offset and strides."""
    found: tuple[int, tuple[int, ...]] | None = node.meta.get("location")
    return found


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has its numbers one behind another, as `Tensor.is_contiguous`."""
    return torch.empty_strided(shape, strides, device="meta").is_contiguous()


def uncast(node: Any) -> Any:
    """What a node casts, if it casts."""
    is_cast = isinstance(node, Node) and node.op == "call_function" and node.target in _CASTS
    return node.args[0] if is_cast else node


def writes(node: Node) -> list[Node]:
    """The nodes whose tensors an operator changes in place."""
    return [] if node.op != "call_function" else list(_written(node.target, node.args, node.kwargs))


@attrs.frozen
class Extent:
    """A size that depends on how many tokens there are, ``[B, L]``.

    Attributes:
        factor: What it is a multiple of, it is so many times.
        of_sequences: Whether it is a multiple of ``B``.
        of_columns: Whether it is a multiple of ``L``.
    """

    factor: int
    of_sequences: bool
    of_columns: bool


@attrs.frozen(eq=False)
class Recording:
    """What a function has run.

    Attributes:
        graph: Its operators, in their order; before them the tensors that they are given from
            outside, as ``get_attr`` nodes.
        tensors: These tensors, by the targets of their nodes.
        output: What the function returned.
    """

    graph: Graph
    tensors: dict[str, Tensor]
    output: Any

    @property
    def precision(self) -> torch.dtype:
        """The lowest precision of the numbers that it is given, such as weights."""
        dtypes = (one.dtype for one in self.tensors.values() if one.is_floating_point())
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    def program(
        self,
        inputs: Sequence[Tensor] = (),
        instead: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> "Program":
        """What runs the graph.

        Args:
            inputs: Tensors ``[B, L]`` of the recording in whose place it is given others.
            instead: Functions to call in place of operators.
        """
        return Program(self.graph, self.tensors, inputs, instead or {})


class Program:
    """Runs a graph, as a function of Python that is written for it.

    Unlike `torch.fx.GraphModule` it belongs to no circle of references, so that the tensors of a
    run are freed at its end.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        instead: Mapping[Callable[..., Any], Callable[..., Any]],
    ) -> None:
        """Take over a graph and the tensors that it is given from outside, see `Recording`."""
        last_use: dict[Node, Node] = {}
        for node in reversed(graph.nodes):
            for used in node.all_input_nodes:
                last_use.setdefault(used, node)
        self._names: dict[str, Any] = {}
        given = {f"given_{index}": tensor for index, tensor in enumerate(inputs)}
        lines = [f"def run({', '.join(given)}):"]
        if given:
            lines.append("    num_sequences, num_columns = given_0.shape")
        for node in graph.nodes:
            if node.op == "get_attr":
                tensor = tensors[str(node.target)]
                places = [name for name, one in given.items() if one is tensor]
                lines += [f"    {node.name} = {place}" for place in places]
                if not places:
                    self._names[node.name] = tensor
                continue
            if node.op == "output":
                lines.append(f"    return {self._source(node.args[0])}")
                continue
            # Without the Python around an operator.
            target = instead.get(node.target, node.target)
            function = self._name(getattr(target, "_op", target))
            arguments = [self._source(one) for one in node.args]
            arguments += [f"{name}={self._source(one)}" for name, one in node.kwargs.items()]
            lines.append(f"    {node.name} = {function}({', '.join(arguments)})")
            done = [used.name for used in node.all_input_nodes if last_use[used] is node]
            done = [name for name in done if name not in self._names]
            done += [] if node.users else [node.name]
            if done:
                lines.append(f"    del {', '.join(done)}")
        exec("\n".join(lines), self._names)
        self._run: Callable[..., Any] = self._names.pop("run")

    def __call__(self, *inputs: Tensor) -> Any:
        """Run it, on inputs of one shape; returns what the recorded function returns."""
        return self._run(*inputs)

    def _source(self, value: Any) -> str:
        """A value in Python."""
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (tuple, list)):
            parts = "".join(f"{self._source(one)}, " for one in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        if isinstance(value, Extent):
            sizes = ["num_sequences"] * value.of_sequences + ["num_columns"] * value.of_columns
            return " * ".join([str(value.factor), *sizes])
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A name for a value that is known beforehand."""
        name = f"_{len(self._names)}"
        self._names[name] = value
        return name


def record(run: Callable[[], Any]) -> Recording:
    """Run a function, and record the operators that it runs.

    Args:
        run: The function; it reads no value on the host.

    Raises:
        NotRecordableError: It reads one, or computes by other means than operators of torch.
    """
    recorder = _Recorder()
    try:
        with recorder, witnessed(recorder.opaque):
            output = run()
    except Exception:
        if recorder.refusal is None:
            raise
    if recorder.refusal is not None:  # what is called may wrap it in an error of its own
        raise recorder.refusal
    recorder.graph.output(tree_map(recorder.node_of, output))
    return Recording(recorder.graph, recorder.tensors, output)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self.tensors: dict[str, Tensor] = {}
        self._nodes: Any = WeakTensorKeyDictionary()
        self._unwritten: set[int] = set()  # storages
        self.refusal: NotRecordableError | None = None

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; another value as it is."""
        if not isinstance(value, Tensor):
            return value
        node = self._nodes.get(value)
        if node is None:
            name = f"tensor_{len(self.tensors)}"
            self.tensors[name] = value
            with self.graph.inserting_before():
                node = self.graph.create_node("get_attr", name)
            self._know(value, node)
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_mutable = func._schema.is_mutable
        if not is_mutable and any(result is one for one in given):
            return result  # such as a cast to the precision that it has
        if not given and not any(isinstance(one, Tensor) for one in tree_leaves(result)):
            return result  # such as the precision that two have in common
        try:
            self._check(func, args, kwargs, given, result)
        except NotRecordableError as refusal:
            self.refusal = refusal
            raise
        node = self.graph.call_function(
            func, tree_map(self.node_of, args), tree_map(self.node_of, kwargs)
        )
        memory = {*map(_storage, given)}
        node.meta["is_view"] = func._schema.name in _ALLOCATES or (
            not is_mutable and isinstance(result, Tensor) and _storage(result) in memory
        )
        if isinstance(result, Tensor):
            self._know(result, node)
        elif isinstance(result, (tuple, list)):
            for index, part in enumerate(result):
                of_part = self.graph.call_function(getitem, (node, index))
                of_part.meta["is_part"] = not is_mutable and _storage(part) in memory
                self._know(part, of_part)
        return result

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function that torch is not told of, which gives a tensor, as one operator."""
        if _get_current_dispatch_mode() is not self:  # within an operator, which is recorded
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        given = tree_map(self.node_of, args), tree_map(self.node_of, kwargs)
        self._know(result, self.graph.call_function(function, *given))
        return result

    def _know(self, tensor: Tensor, node: Node) -> None:
        node.meta["layout"] = Layout.of(tensor)
        if not tensor.is_mkldnn:
            node.meta["location"] = tensor.storage_offset(), tuple(tensor.stride())
        self._nodes[tensor] = node

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        """Refuse what the graph would leave out.

        Raises:
            NotRecordableError: See `record`.
        """
        name = func._schema.name
        results = [] if result is None else tree_leaves(result)
        has_fixed_shape = torch.Tag.dynamic_output_shape not in func.tags or (
            func is torch.ops.aten.index.Tensor
            and all(one is None or one.dtype in (torch.int32, torch.int64) for one in args[1])
        )
        if not has_fixed_shape or not all(isinstance(one, Tensor) for one in results):
            msg = f"it reads values on the host, by {name}"
            raise NotRecordableError(msg)
        if any(one.is_cpu for one in results) and not all(one.is_cpu for one in given):
            msg = f"it copies values to the host, by {name}"
            raise NotRecordableError(msg)
        written = {id(one) for one in _written(func, args, kwargs)}
        is_view = any(
            one.alias_info and not one.alias_info.is_write for one in func._schema.returns
        )
        if not is_view:
            read = (_storage(one) for one in given if id(one) not in written)
            if not self._unwritten.isdisjoint(read):
                msg = "kernels run in it that torch is not told of"
                raise NotRecordableError(msg)
            self._unwritten.difference_update(
                map(_storage, [*results, *_written(func, args, kwargs)])
            )
        if name in _ALLOCATES:
            self._unwritten.update(_storage(one) for one in results if one.numel())


def getitem(parts: Any, index: int) -> Any:
    """One of several results of an operator."""
    return parts[index]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    by_name = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    for one in schema.arguments:
        if one.alias_info is not None and one.alias_info.is_write and one.name in by_name:
            yield from (leaf for leaf in tree_leaves(by_name[one.name]) if leaf is not None)


def _storage(tensor: Tensor) -> int:
    if tensor.is_mkldnn:  # packed weights, which share their memory with nothing
        return id(tensor)
    return tensor.untyped_storage()._cdata
