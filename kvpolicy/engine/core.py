"""What all runs of an engine share: a model, and the policies of a plan bound to it."""

import time
from collections import abc
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from kvpolicy.engine.batch import RunningBatch
from kvpolicy.engine.memory.heads import check_heads
from kvpolicy.engine.requests.isolation import ErrorScope, OnHookError
from kvpolicy.engine.reuse.resuming import Resuming
from kvpolicy.engine.reuse.reusing import Reusing
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.generation_config import GenerationRules
from kvpolicy.model.packed import CpuWeights, packed_model, wants_packing
from kvpolicy.model.static_forward import Compiled, compile_problem
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Bound

DEFAULT_SLOTS = 8
DEFAULT_CHUNK = 512
DEFAULT_MAX_TOKENS = 8192  # in one forward
DEFAULT_STEPS_PER_READ = 8  # on a GPU


class EngineCore:
    """A model, the policies of a plan bound to it, and how many sequences are served together.

    Attributes:
        adapter: The model.
        rules: Its generation config, as it was when the engine was made; only where
            ``chooses_tokens``.
        tokenizer: Its tokenizer, if there is one.
        plan: The plan, resolved for this model.
        stacks: The policies of each layer.
        bound: What these have made of the weights of each layer.
        scheduling: The policies of `schedule`.
        errors: Isolates errors of hooks.
        resuming: Takes snapshots of sequences, and resumes them.
        prefix_store: Keeps parts of sequences, if there is one.
        reusing: Finds and stores them.
        num_slots: Sequences that are decoded together.
        chunk: The most prompt tokens of one sequence in one forward.
        eager_reason: Why decode steps take the eager path; ``None``: they are static.
        compiled: Runs static steps, if they are compiled.
        max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
        weights: The packed weights of the model, if it has any.
        steps_per_read: The most static decode steps whose tokens are read together.
    """

    chooses_tokens: ClassVar[bool] = False  # a cache leaves that to `generate`
    rules: GenerationRules

    def __init__(
        self,
        model: PreTrainedModel | ModelAdapter,
        tokenizer: Any = None,
        plan: Plan | ResolvedPlan | None = None,
        *,
        slots: int = DEFAULT_SLOTS,
        chunk: int = DEFAULT_CHUNK,
        max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
        on_hook_error: OnHookError = "raise",
        eager: bool = False,
        compile: bool = False,
        cpu_weights: CpuWeights = "plain",
        steps_per_read: int | None = None,
        prefix_store: PrefixStore | None = None,
    ) -> None:
        """Bind a plan to a model, which is left as it is.

        Args:
            model: A decoder-only transformers model, or an adapter.
            tokenizer: Its tokenizer; without one, prompts are token ids.
            plan: The plan: policies, budgets and buffers of each layer.
            slots: Sequences that are decoded together.
            chunk: The most prompt tokens of one sequence in one forward. A forward never has
                more tokens than the slabs can take, and slabs are compacted when they are full:
                another chunk takes other time and memory, and changes results by rounding only.
            max_tokens_per_forward: The most prompt tokens of all sequences together in one
                forward, pads included; the other sequences of a group wait for the next forwards.
                It bounds the memory of activations in prefill.
            on_hook_error: What happens if a policy raises or its answer breaks the contract.
                ``"raise"``: the run ends with a `HookError`. ``"answer"``: the requests of the
                failing call end with the error, and the others go on as if these had been
                cancelled. Errors of the whole run, such as a lack of memory, are always raised.
            eager: Whether decode steps take the eager path, which is slower, although they could
                be static. Results are the same.
            compile: Whether `torch.compile` compiles the model's forward of a decode step, when
                the first one runs. It needs a C++ compiler, or Triton on a GPU, and takes a
                minute or more for a large model; tokens may differ by rounding.
            cpu_weights: ``"packed"`` runs `kvpolicy.packed_model` of the model: faster steps on
                a CPU, with products that differ by rounding. The plain weights stay in memory
                beside the packed ones, since the model is left as it is; to release them, give
                ``packed_model(model, release=True)`` for the model instead.
            steps_per_read: The most static decode steps that follow each other before their
                tokens are read. Stop strings, cancelling and new requests take effect when they
                are; results are the same. ``None``: 8 on a GPU, where reading is a wait, and 1 on
                a CPU.
            prefix_store: Keeps rows of prompts and of conversations for requests that begin with
                the same tokens, which then compute the rest only. ``None``: nothing is reused.

        Raises:
            ModelError: If the engine cannot run the model, follow its generation config, pack its
                weights, or compile it.
            PlanError: If the plan does not fit the model.
        """
        sizes = {"slots": slots, "chunk": chunk, "max_tokens_per_forward": max_tokens_per_forward}
        if steps_per_read is not None:
            sizes["steps_per_read"] = steps_per_read
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"the engine was given {name}={value!r}; expected an integer of at least 1"
                raise KVPolicyError(msg)
        if not isinstance(plan, (Plan, ResolvedPlan)):
            given = "no plan" if plan is None else f"{plan!r:.60} for a plan"
            msg = (
                f"the engine was given {given}; write Plan.load(FILE) or Plan.uniform(NAME, "
                f"budget=128), where NAME is one of {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        self.errors = ErrorScope(on_hook_error)
        if wants_packing(cpu_weights):
            if isinstance(model, ModelAdapter):
                msg = (
                    "the engine was given cpu_weights='packed' and an adapter, whose model is "
                    "chosen already; make the adapter of packed_model(model)"
                )
                raise KVPolicyError(msg)
            model = packed_model(model)
        self.adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
        if self.chooses_tokens:
            self.rules = GenerationRules(self.adapter.model, self.adapter.vocab_size)
        self.weights = self.adapter.weights
        self.tokenizer = tokenizer
        self.plan = plan.resolve(self.adapter.num_layers)
        check_heads(self.plan, self.adapter)
        self.stacks = self.plan.stacks()
        self.scheduling = self.plan.scheduling_stack()
        self.resuming = Resuming(self.adapter, self.plan, self.stacks, tokenizer)
        self.num_slots = slots
        self.chunk = chunk
        self.max_tokens_per_forward = max_tokens_per_forward
        self.adapter.add_hooks(
            steered=[i for i, stack in enumerate(self.stacks) if stack.is_steered(i)],
            states=any("hidden_states" in stack.observes for stack in self.stacks),
            marked=[i for i, stack in enumerate(self.stacks) if stack.is_marked],
        )
        self.eager_reason = "asked for" if eager else self.adapter.eager_reason
        self.adapter.check_forward(static=self.eager_reason is None)
        self.bound = self._bind()
        self.compiled = self._compiled() if compile else None
        self.prefix_store = prefix_store
        self.reusing = None
        if prefix_store is not None:
            self.reusing = Reusing(
                prefix_store, self.resuming, self.adapter, self.plan, self.stacks, tokenizer
            )
        on_cpu = self.adapter.device.type == "cpu"
        self.steps_per_read = steps_per_read or (1 if on_cpu else DEFAULT_STEPS_PER_READ)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would share slots, threads and files.

        Raises:
            KVPolicyError: Always.
        """
        msg = (
            "an engine cannot be copied or pickled; make another one with Engine(model, tokenizer, "
            "plan), which may have the same model"
        )
        raise KVPolicyError(msg)

    @property
    def compile_s(self) -> float:
        """Seconds in which decode steps were compiled so far."""
        return 0.0 if self.compiled is None else self.compiled.seconds

    @property
    def clock(self) -> abc.Callable[[], float]:
        """Tells the time in seconds; it stands still while decode steps are compiled."""
        return time.perf_counter if self.compiled is None else self.compiled.clock

    def _compiled(self) -> Compiled:
        reason = compile_problem(self.adapter.device, packed=self.weights.packed_bytes > 0)
        if self.eager_reason is not None:
            reason = f"its decode steps are not static: {self.eager_reason}"
        if reason is not None:
            name = type(self.adapter.model).__name__
            msg = f"the forward of {name} cannot be compiled: {reason}; leave out compile"
            raise ModelError(msg)
        return Compiled()

    def _bind(self) -> list[Bound]:
        """Show policies the weights of their layers."""
        binding = [i for i, stack in enumerate(self.stacks) if stack.implements("bind")]
        bound = [Bound() for _ in self.stacks]
        if binding:
            with torch.no_grad():
                for index, weights in zip(
                    binding, self.adapter.layer_weights(binding), strict=True
                ):
                    bound[index] = self.stacks[index].bind(index, weights)
        return bound

    def new_batch(
        self,
        num_slots: int,
        longest: int,
        longest_prompt: int | None = None,
        *,
        max_steps: int = 0,
        errors: ErrorScope | None = None,
    ) -> RunningBatch:
        """An empty batch for so many sequences of at most ``longest`` tokens.

        A prompt may have all of them unless ``longest_prompt`` is given. ``max_steps`` is the most
        static decode steps whose tokens are read together; 0: decode steps are not static.
        ``errors`` isolates errors of hooks, if the engine's scope does not.
        """
        return RunningBatch(
            self.adapter,
            self.plan,
            self.stacks,
            self.bound,
            errors or self.errors,
            self.resuming,
            tokenizer=self.tokenizer,
            chunk=self.chunk,
            max_tokens_per_forward=self.max_tokens_per_forward,
            num_slots=num_slots,
            longest=longest,
            longest_prompt=longest_prompt,
            max_steps=max_steps,
            compiled=self.compiled if max_steps else None,
            reusing=self.reusing,
        )
