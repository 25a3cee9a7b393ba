"""Which kernels does Inductor make of a decode step for a GPU? Counted without one.

    python tests/support/inductor_kernels.py                           # two minutes
    python tests/support/inductor_kernels.py --layers 1 2 --code step.py

A step of the shape of Qwen3-8B in bf16, with fewer layers, is recorded as for `kvpolicy bench
--launches`, and goes the way of `torch.compile` after Dynamo: AOTAutograd, and Inductor's passes,
scheduler and code. The code is counted, and neither compiled nor run. Inductor asks a card for its
sizes; here it is told those of an H200, in functions of torch 2.13 and triton 3.7 that have other
names elsewhere.
"""

import argparse
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.cache.static_step import Continuation, StaticStep
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.lab.bench.models import SHAPES, random_model
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.fused.record import Recording, record
from kvpolicy.model.static_forward import static_forward

CARD = torch.device("cuda", 0)
H200 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
KINDS = {
    "Triton": r"\btriton_\w+\.run\(",
    "products": r"\bextern_kernels\.\w+\(",
    "attention": r"\btorch\.ops\.kvpolicy\.decode\.default\(",
}


def recorded(layers: int, batch: int, rows: int) -> Recording:
    """A decode step of a model on the device ``meta``."""
    shape = attrs.evolve(SHAPES["qwen3-8b"], num_layers=layers)
    model = random_model(shape, 0, max_positions=16384, dtype="bfloat16", device="meta")
    adapter = ModelAdapter(model)
    slabs = [Slab(rows)] * layers
    step = StaticStep(KVCache(adapter.layer_shapes(), slabs, batch), in_graph=True)
    step.begin([0] * batch, [Continuation(rows, frozenset(), Sampling())] * batch)
    found: list[Recording] = []

    def run(call: Any, given: Any) -> Any:
        found.append(record(lambda: static_forward(call, given)))
        return found[0].output

    tokens = torch.zeros(batch, 1, dtype=torch.int64)
    adapter.forward(ForwardInput(tokens, step, run=run, draws=True))
    return found[0]


def on_cpu(recording: Recording) -> tuple[GraphModule, list[torch.Tensor]]:
    """What was recorded as a function of the tensors from outside, and these."""
    graph, found, tensors = Graph(), {}, []
    for node in recording.graph.nodes:
        if node.op == "get_attr":
            found[node] = graph.placeholder(node.name)
            tensors.append(recording.tensors[str(node.target)])
    for node in recording.graph.nodes:
        if node.op != "get_attr":
            new = found[node] = graph.node_copy(node, found.__getitem__)
            new.meta = {}
            if new.kwargs.get("device") is not None:
                new.kwargs = {**new.kwargs, "device": torch.device("cpu")}
    return GraphModule(torch.nn.Module(), graph), tensors


def code_of(recording: Recording) -> str:
    """The code that Inductor writes for it."""
    module, tensors = on_cpu(recording)
    mode, code = FakeTensorMode(), []

    def like(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def to_card(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with unset_fake_temporarily():
            meta = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return FakeTensor(mode, meta, CARD)

    def compiler(given: GraphModule, examples: Any, **_: Any) -> Any:
        with V.set_fake_mode(mode):
            _recursive_joint_graph_passes(given)
            _recursive_post_grad_passes(given, is_inference=True)
        for node in given.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(to_card, node.meta["val"])
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": CARD}
        examples = [to_card(one) for one in examples]
        with told_of_a_card():
            lowering = GraphLowering(
                given, example_inputs=examples, graph_id=0, is_inference=True, cpp_wrapper=False
            )
            with (
                V.set_debug_handler(DebugContext()),
                V.set_graph_handler(lowering),
                V.set_fake_mode(mode),
            ):
                lowering.run(*examples)
                code.append(lowering.codegen()[0].value)
        return lambda *_: None

    with torch.no_grad(), tracing(TracingContext(mode)):
        aot_module_simplified(
            module,
            [like(one) for one in tensors],
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
    return code[0]


def told_of_a_card() -> ExitStack:
    """Answers what Inductor asks a driver, in a block."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    card = SimpleNamespace(name="NVIDIA H200", **H200._asdict())
    stack = ExitStack()
    for owner, name, value in (
        (DeviceProperties, "create", lambda _: H200),
        (driver, "_active", target),
        (CudaInterface.Worker, "get_device_properties", lambda *_: card),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_properties", lambda *_: card),
    ):
        stack.enter_context(patch.object(owner, name, value))
    return stack


def main() -> None:
    """Print a row for each number of layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--rows", type=int, default=8704, help="rows of a slab")
    parser.add_argument("--code", type=Path, help="a file for the code of the last step")
    args = parser.parse_args()
    headings = ["layers", *KINDS, "different ones of Triton", "processor, s"]
    sys.stdout.write(f"| {' | '.join(headings)} |\n{'|--:' * len(headings)}|\n")
    for layers in args.layers:
        recording = recorded(layers, args.batch, args.rows)
        start = time.process_time()
        code = code_of(recording)
        seconds = time.process_time() - start
        calls = code[code.index("def call(") :]
        counts = [len(re.findall(pattern, calls)) for pattern in KINDS.values()]
        different = len(set(re.findall(r"\b(triton_\w+)\.run\(", calls)))
        cells = map(str, [layers, *counts, different, round(seconds, 1)])
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    if args.code is not None:
        args.code.write_text(code, encoding="utf-8")


if __name__ == "__main__":
    main()
