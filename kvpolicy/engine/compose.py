"""The one place where features are named: a plan becomes a core, with the extensions it needs.

A feature that a plan does not use is not imported.
"""

from collections import abc
from typing import Any

import attrs
import torch

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import Slab
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine.bound_plan import BoundPlan
from kvpolicy.engine.core import Core
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.extensions.base import Extension, Extensions
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.runner import Runner
from kvpolicy.features import feature, is_there
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.static_forward import Compiled
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Bound, RegisterFile

# Bytes are counted on tensors without memory.
_META = torch.device("meta")

_EXTENSIONS = "kvpolicy.engine.extensions."

# Extensions that serve requests, and the fields by which these ask for them.
_OF_REQUESTS = {
    "logprobs": ("logprobs", "prompt_logprobs"),
    "snapshots": ("snapshot", "resume"),
    "embedded": ("images",),
}


def core_of(
    bound: BoundPlan,
    num_slots: int,
    longest: int,
    longest_prompt: int | None = None,
    longest_entering: int | None = None,
    *,
    max_steps: int = 0,
    compiled: Compiled | None = None,
    errors: ErrorScope | None = None,
    prefixes: Any = None,
) -> Core:
    """All parts for a plan that is bound to a model; slabs are allocated.

    Args:
        bound: The plan, the model, the policies.
        num_slots: The most sequences.
        longest: Tokens of the longest sequence.
        longest_prompt: Tokens of the longest prompt, if they are known to be fewer.
        longest_entering: The most tokens that a sequence has when its first token is drawn, if they
            are known to be fewer.
        max_steps: The most static decode steps that are launched before the tokens of the first
            of them are read; 0: decode steps are not static.
        compiled: Runs static steps instead of the model as it is.
        errors: Isolates errors of hooks; ``None``: as the engine does.
        prefixes: What is bound of a prefix store; ``None``: nothing is reused.
    """
    errors, timings = errors or bound.errors, PolicyTimings()
    adapter, stacks = bound.adapter, bound.stacks
    num_staged = bound.plan.num_staged(
        num_slots, bound.max_tokens_per_forward, longest, longest_entering
    )
    slabs = slabs_of(bound.plan, longest, longest_prompt, longest_entering, num_staged)
    cache = adapter.new_cache(slabs, num_slots)
    policies = [policy for stack in stacks for policy in stack.policies]
    registers = RegisterFile(policies, num_slots, adapter.device)
    cache.slot_tensors += registers.all
    parts = Parts(
        bound.plan,
        adapter,
        stacks,
        bound.bound,
        bound.tokenizer,
        registers,
        timings,
        errors,
        bound.chunk,
        bound.max_tokens_per_forward,
    )
    own = [*_logprobs(adapter), *parts.of_policies(), *_embedded(bound)]
    own += _copies(bound, registers, prefixes)
    extensions = Extensions([*own, *(make() for make in bound.extensions)])
    evictor = Evictor(
        cache,
        bound.plan.layers,
        stacks,
        timings,
        errors,
        extensions=extensions,
        make_rows=adapter.processes.layer_rows,
        repeats=adapter.processes.num_processes == 1,
        bound=bound.bound,
        image_ids=adapter.image_ids,
    )
    core = Core(cache, evictor, extensions, timings)
    for one in extensions:
        one.attach(core)
    problem = next((one.graph_problem for one in extensions if one.graph_problem), None)
    keepers = [one for one in extensions if one.ring is not None]
    static = None
    if max_steps:
        static = StaticStep(
            cache,
            [one.ring for one in keepers if one.ring is not None],
            in_graph=compiled is not None,
            padded=adapter.device.type == "cuda" and problem is None,
        )
    core.runner = Runner(
        adapter,
        cache,
        static,
        max_steps=max_steps,
        num_taken=[one.num_taken for one in keepers],
        compiled=compiled,
        graph_problem=problem,
    )
    return core


def bind_prefixes(store: Any, bound: BoundPlan) -> Any:
    """What finds and stores the sequences of an engine in a prefix store.

    Raises:
        KVPolicyError: If it is no prefix store, or sequences of the engine cannot be copied.
        ModelError: If weights of the model are not in memory.
    """
    make = _feature("prefix_reuse", "Prefixes", "prefix stores")
    parts = bound.resuming, bound.adapter, bound.plan, bound.stacks, bound.tokenizer
    return make(store, *parts)


def snapshots_of(core: Core) -> Any:
    """What takes snapshots of the sequences of a core, and puts them into slots.

    Raises:
        KVPolicyError: Its file is not there.
    """
    return core.extensions.find(_feature("snapshots", "Snapshots", "snapshots"))


def images_of(core: Core) -> Any:
    """What gives the decoder the embeddings of prompts with images.

    Raises:
        KVPolicyError: Its file is not there.
    """
    return core.extensions.find(_feature("embedded", "Embedded", "prompts with images"))


def slabs_of(
    plan: ResolvedPlan,
    longest: int,
    longest_prompt: int | None,
    longest_entering: int | None,
    num_staged: int,
) -> list[Slab]:
    """What each layer stores; the arguments are those of `LayerPlan.slab`."""
    sizes = longest, longest_prompt, longest_entering, num_staged
    pairs = zip(plan.layers, plan.stacks(), strict=True)
    return [layer.slab(stack, *sizes) for layer, stack in pairs]


def slot_bytes(plan: ResolvedPlan, adapter: ModelAdapter) -> int:
    """Bytes of a sequence that belong to no slab: registers, and states kept for policies."""
    stacks = plan.stacks()
    policies = [policy for stack in stacks for policy in stack.policies]
    registers = RegisterFile(policies, 1, _META)
    cache, errors = KVCache([], [], num_slots=1), ErrorScope("raise")
    parts = Parts(plan, adapter, stacks, (), None, registers, PolicyTimings(), errors)
    core = Core(cache, Evictor(cache, (), (), parts.timings, errors), Extensions(), parts.timings)
    for one in parts.of_policies(device=_META):
        one.attach(core)
    return sum(tensor.nbytes for tensor in [*registers.all, *cache.slot_tensors])


@attrs.frozen(eq=False)
class Parts:
    """What extensions are made of.

    Attributes:
        plan: The plan.
        adapter: The model.
        stacks: The policies of each layer.
        bound: What these have made of the weights of each layer.
        tokenizer: The model's, if there is one.
        registers: The registers of all slots.
        timings: Measures the time of policies.
        errors: Isolates errors of hooks.
        chunk: The most prompt tokens of one sequence in one forward.
        max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
    """

    plan: ResolvedPlan
    adapter: ModelAdapter
    stacks: abc.Sequence[Stack]
    bound: abc.Sequence[Bound]
    tokenizer: Any
    registers: RegisterFile
    timings: PolicyTimings
    errors: ErrorScope
    chunk: int = 1
    max_tokens_per_forward: int = 1

    def of_policies(self, device: torch.device | None = None) -> abc.Iterator[Extension]:
        """The extensions that some policy's hooks need, in the order of their calls.

        Args:
            device: Where they allocate; ``None``: on the devices of the layers.
        """
        stacks, adapter, layers = self.stacks, self.adapter, self.plan.layers
        calls = self.timings, self.errors
        sizes = {"hidden_size": adapter.hidden_size, "dtype": adapter.model.dtype}
        if any(stack.is_annotated for stack in stacks):
            make = _feature("annotate", "Annotate", "policies that implement annotate()")
            yield make(
                layers, stacks, self.bound, *calls, adapter.processes, **sizes, device=device
            )
        if any(stack.implements("observe") for stack in stacks):
            make = _feature("observe", "Observe", "policies that implement observe()")
            own = layers, stacks, self.registers, self.tokenizer
            yield make(*own, *calls, **sizes, device=device or adapter.last_device)
        if any(stack.implements("lookahead") for stack in stacks):
            make = _feature("lookahead", "LookaheadQueries", "policies that implement lookahead()")
            limits = {
                "chunk": min(self.chunk, self.max_tokens_per_forward),
                "max_tokens_per_forward": self.max_tokens_per_forward,
            }
            yield make(adapter, stacks, self.tokenizer, *calls, **limits)
        if self.plan.padding == "stored":
            yield _feature("stored_pads", "StoredPads", "plans with padding = 'stored'")(layers)
        if any(stack.is_steered(index) for index, stack in enumerate(stacks)):
            make = _feature("steer", "Steer", "policies that implement steer()")
            yield make(stacks, self.registers, self.tokenizer, *calls)


def _logprobs(adapter: ModelAdapter) -> abc.Iterator[Extension]:
    """What measures tokens, before a policy that is shown them may fail."""
    if is_there(_EXTENSIONS + "logprobs"):
        yield _feature("logprobs", "Logprobs", "requests")(adapter.vocab_size)


def _embedded(bound: BoundPlan) -> abc.Iterator[Extension]:
    """What gives the decoder the embeddings of prompts with images."""
    if bound.adapter.embedder is not None and is_there(_EXTENSIONS + "embedded"):
        make = _feature("embedded", "Embedded", "prompts with images")
        yield make(bound.adapter, min(bound.chunk, bound.max_tokens_per_forward))


def _copies(bound: BoundPlan, registers: RegisterFile, prefixes: Any) -> abc.Iterator[Extension]:
    """What copies sequences out of their slots, after policies were shown what is new of them."""
    snapshots = None
    if prefixes is not None or is_there(_EXTENSIONS + "snapshots"):
        snapshots = _feature("snapshots", "Snapshots", "prefixes")(bound.resuming, registers)
        yield snapshots
    if prefixes is not None:
        yield _feature("prefix_reuse", "PrefixReuse", "prefix stores")(prefixes, snapshots)


def problem_with(request: Request) -> str | None:
    """Why a request cannot be served for lack of a feature; ``None`` if none is missing."""
    for module, fields in _OF_REQUESTS.items():
        asked = [name for name in fields if getattr(request, name) not in (None, False)]
        if asked and not is_there(_EXTENSIONS + module):
            return f"{asked[0]} needs {_EXTENSIONS}{module}, whose file is missing; leave it out"
    return None


def _feature(module: str, name: str, who: str) -> Any:
    return feature(_EXTENSIONS + module, name, who)
