"""A plan bound to a model: what all runs of an engine, and a `PolicyCache`, share."""

from collections import abc
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.memory.layers import check_layers
from kvpolicy.engine.requests.isolation import ErrorScope, OnHookError
from kvpolicy.engine.resuming import Resuming
from kvpolicy.errors import KVPolicyError, type_name
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.plan import LARGEST_DEFAULT_PREFILL_BUFFER, Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Bound

DEFAULT_MAX_TOKENS = 8192  # in one forward


def default_chunk(device: torch.device) -> int:
    """The most prompt tokens of one sequence in one forward, unless an engine is given a number.

    A CPU has enough to do with as many as a plan's default ``prefill_buffer`` takes. Elsewhere the
    host launches every operation of a layer for each chunk, in a time in which a GPU computes some
    thousand tokens: what does not evict enters in as few chunks as a forward may have tokens.
    """
    return LARGEST_DEFAULT_PREFILL_BUFFER if device.type == "cpu" else DEFAULT_MAX_TOKENS


class BoundPlan:
    """A model, and the policies of a plan bound to it.

    Attributes:
        adapter: The model.
        tokenizer: Its tokenizer, if there is one.
        plan: The plan, resolved for this model.
        stacks: The policies of each layer.
        bound: What these have made of the weights of each layer.
        scheduling: The policies of `schedule`.
        errors: Isolates errors of hooks.
        resuming: Takes snapshots of sequences, and resumes them.
        chunk: The most prompt tokens of one sequence in one forward.
        max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
        eager_reason: Why decode steps take the eager path; ``None``: they are static.
        extensions: Make extensions for each run, beside those that the plan needs.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelAdapter,
        tokenizer: Any = None,
        plan: Plan | ResolvedPlan | None = None,
        *,
        chunk: int | None = None,
        max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
        on_hook_error: OnHookError = "raise",
        eager: bool = False,
        extensions: abc.Iterable[abc.Callable[[], Extension]] = (),
    ) -> None:
        """Bind a plan to a model, which is left as it is; the arguments are those of `Engine`.

        Raises:
            ModelError: If the engine cannot run the model.
            PlanError: If the plan does not fit the model.
        """
        check_sizes(max_tokens_per_forward=max_tokens_per_forward)
        if chunk is not None:
            check_sizes(chunk=chunk)
        if not isinstance(plan, (Plan, ResolvedPlan)):
            given = "no plan" if plan is None else f"{plan!r:.60} for a plan"
            msg = (
                f"the engine was given {given}; write Plan.load(FILE) or Plan.uniform(NAME, "
                f"budget=128), where NAME is one of {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        self.errors = ErrorScope(on_hook_error)
        self.adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
        self.tokenizer = tokenizer
        adapter = self.adapter
        self.plan = plan.resolve(adapter.num_layers, attention=adapter.attention_layers)
        check_layers(self.plan, self.adapter)
        self.stacks = self.plan.stacks()
        self.scheduling = self.plan.scheduling_stack()
        self.resuming = Resuming(self.adapter, self.plan, self.stacks, tokenizer)
        self.chunk = default_chunk(adapter.device) if chunk is None else chunk
        self.max_tokens_per_forward = max_tokens_per_forward
        self.extensions = _makers(extensions)
        self.adapter.add_hooks(
            steered=[i for i, stack in enumerate(self.stacks) if stack.is_steered(i)],
            # Whether an extension asks for states is known at each step only.
            states=bool(self.extensions)
            or any("hidden_states" in stack.observes for stack in self.stacks),
            annotated=[i for i, stack in enumerate(self.stacks) if stack.is_annotated],
        )
        self.eager_reason = "asked for" if eager else self.adapter.eager_reason
        self.adapter.check_forward(static=self.eager_reason is None)
        self.bound = self._bind()

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


def _makers(extensions: Any) -> tuple[abc.Callable[[], Extension], ...]:
    """What makes extensions, as they were given."""
    given = tuple(extensions) if isinstance(extensions, abc.Iterable) else (extensions,)
    wrong = [one for one in given if one is extensions or not callable(one)]
    for one in wrong:
        what = (
            f"{one.__name__} alone" if isinstance(one, type) else f"an object of {type_name(one)}"
        )
        msg = (
            f"extensions were given as {what}; give a list of their classes, or of other functions "
            "without arguments, so that each run makes its own"
        )
        raise KVPolicyError(msg)
    return given


def check_sizes(**sizes: int) -> None:
    """Check numbers that an engine is given, by the name of the argument.

    Raises:
        KVPolicyError: One is no integer of at least 1.
    """
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            msg = f"the engine was given {name}={value!r}; expected an integer of at least 1"
            raise KVPolicyError(msg)
