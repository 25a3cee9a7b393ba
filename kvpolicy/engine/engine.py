"""The engine: continuous batching over slots, with compactions between forwards.

A run goes round a small circle: admit waiting requests into free slots and prefill them,
decode one token for every sequence, compact the slabs that are full, hand out what is done.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvpolicy.engine.isolation import ErrorScope, OnHookError
from kvpolicy.engine.request import Request, Sampling, samplings_of
from kvpolicy.engine.run import Run
from kvpolicy.engine.stream import Stream
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan

DEFAULT_SLOTS = 8
DEFAULT_CHUNK = 512


class Engine:
    """A model, a plan, and so many slots.

    Attributes:
        plan: The plan, spelled out for this model.
        stacks: The policies of each layer.
        asking: Whom the hook call under way is about.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelAdapter,
        tokenizer: Any = None,
        plan: Plan | ResolvedPlan | None = None,
        *,
        slots: int = DEFAULT_SLOTS,
        chunk: int = DEFAULT_CHUNK,
        on_hook_error: OnHookError = "raise",
    ) -> None:
        """Bind a plan to a model; the model is not changed.

        Args:
            model: A decoder-only transformers model, or a seam that stands for one.
            tokenizer: Its tokenizer; without one, prompts are token ids.
            plan: What each layer does with its cache.
            slots: Sequences that are decoded together.
            chunk: The most prompt tokens of one sequence in one forward. A forward never
                brings more than the slabs can take, whatever this says.
            on_hook_error: What happens when a policy raises, or answers a hook wrongly.
                ``"raise"``: the run raises `HookError` and is over. ``"answer"``: the requests
                that this call was about are answered with the error, and the others go on as
                if these had been cancelled. What concerns the whole run, as a lack of memory
                does, is raised in either case.

        Raises:
            ModelError: If the engine cannot run the model.
            PlanError: If the plan does not fit the model.
        """
        for what, value in (("slots", slots), ("chunk", chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"the engine was given {what}={value!r}; at least 1 is needed"
                raise KVPolicyError(msg)
        if not isinstance(plan, (Plan, ResolvedPlan)):
            given = "no plan" if plan is None else f"{plan!r:.60} for a plan"
            msg = (
                f"the engine was given {given}; write Plan.load(FILE) or Plan.uniform(NAME, "
                f"budget=128), NAME being one of {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        if model is None or isinstance(model, (str, Path, tuple)):
            msg = (
                f"the engine was given {model!r:.60} for a model; load it first: "
                "model, tokenizer = load_model(NAME)"
            )
            raise ModelError(msg)
        self.asking = ErrorScope(on_hook_error)
        self.adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
        self.tokenizer = tokenizer
        self.plan = plan.resolve(self.adapter.num_layers)
        self.stacks = self.plan.stacks()
        self.scheduling = self.plan.scheduling_stack()
        self.num_slots = slots
        self.chunk = chunk

    def generate(
        self,
        prompts: Iterable[str | Sequence[int] | Request],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
    ) -> Run:
        """Continue prompts; iterate over the answer for results as they finish.

        Args:
            prompts: Texts, token ids, or whole requests, to which the other arguments do
                not apply.
            max_new_tokens: The most tokens to generate for each.
            sampling: How tokens are drawn, for all prompts or one for each.
            stop: Texts that end a generation.
            stop_ids: Tokens that end a generation; ``None`` means the model's own.

        Returns:
            A run. Nothing is computed before it is iterated over.
        """
        if isinstance(prompts, (str, Request)):
            msg = f"generate() was given one prompt, {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        if not isinstance(prompts, Iterable):
            msg = f"prompts were given as {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        prompts = list(prompts)
        drawing = samplings_of(sampling, len(prompts))
        requests = [
            prompt
            if isinstance(prompt, Request)
            else Request(prompt, max_new_tokens, how, stop, stop_ids)
            for prompt, how in zip(prompts, drawing, strict=True)
        ]
        return Run(self, requests)

    def stream(self, prompt: str | Sequence[int] | Request, **options: Any) -> Stream:
        """Continue one prompt; iterate over the answer for its text, piece by piece.

        Args:
            prompt: Text, token ids, or a whole request.
            options: As for `generate`.
        """
        return Stream(self.generate([prompt], **options))
