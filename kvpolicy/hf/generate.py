"""Doors of transformers that open on a `PolicyCache`: ``custom_generate`` and pipelines."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TextGenerationPipeline
from transformers.generation.configuration_utils import GenerationMode

from kvpolicy.errors import CacheError
from kvpolicy.hf.policy_cache import PolicyCache
from kvpolicy.hf.report import CacheReport
from kvpolicy.plan.plan import Plan

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    plan: Plan | None = None,
    **arguments: Any,
) -> Any:
    """Generate within a plan: for ``model.generate(..., custom_generate=generate, plan=plan)``.

    Everything else is as `generate` has it: it prepares its inputs, logits processors and
    stopping criteria, and its own loop draws the tokens. It gives no ``streamer`` and no
    ``tokenizer`` to functions of this kind: with those, pass a `PolicyCache`.

    Args:
        model: The model.
        input_ids: Prompts, ``[B, columns]``, padded on the left.
        generation_config: How to generate; greedy or sampling.
        plan: What each layer does with its cache; not needed with a `PolicyCache`.
        arguments: What `generate` gives to every function of this kind. Its
            ``past_key_values`` is a `PolicyCache` to go on with, or the empty cache that
            `generate` has made, which is left aside.

    Returns:
        What `generate` returns.

    Raises:
        CacheError: For any other mode of generation, or if prompts do not continue the cache.
    """
    mode = generation_config.get_generation_mode()
    if mode not in _MODES:
        msg = (
            f"kvpolicy.hf.generate was asked for {mode.value.replace('_', ' ')}; it does greedy "
            "search and sampling"
        )
        raise CacheError(msg)
    # Not by name in the signature: generate would hand those over without preparing them.
    cache = arguments.get("past_key_values")
    if isinstance(cache, PolicyCache):
        cache.check_prompt(input_ids, arguments.get("attention_mask"))
    else:
        if cache is not None and cache.get_seq_length():
            msg = (
                "kvpolicy.hf.generate was given a cache of transformers that is not empty; leave "
                "it out, or go on with a PolicyCache"
            )
            raise CacheError(msg)
        length = generation_config.max_length
        arguments["past_key_values"] = PolicyCache(model, plan, max_length=length)
    # The one loop of transformers for both modes; there is no public name for it.
    sample: Any = model._sample
    return sample(input_ids, generation_config=generation_config, **arguments)


class PolicyPipeline(TextGenerationPipeline):
    """A text-generation pipeline in which every batch gets a `PolicyCache` of its own.

    Attributes:
        plan: The plan.
        report: What the newest batch has cost; ``None`` before the first.
    """

    def __init__(self, *args: Any, plan: Plan, **options: Any) -> None:
        """As `TextGenerationPipeline`, with a plan."""
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self.plan = plan
        self.report: CacheReport | None = None
        # A plan that does not fit the model is better refused now.
        PolicyCache(self.model, plan, self.tokenizer)

    def _forward(self, model_inputs: Any, **options: Any) -> Any:  # type: ignore[override]
        cache = PolicyCache(self.model, self.plan, self.tokenizer)
        options["past_key_values"] = cache
        answer = super()._forward(model_inputs, **options)  # type: ignore[no-untyped-call]
        self.report = cache.report
        return answer


def pipeline(model: PreTrainedModel, tokenizer: Any, plan: Plan, **options: Any) -> PolicyPipeline:
    """A text-generation pipeline that generates within a plan.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer; told to pad on the left.
        plan: What each layer does with its cache.
        options: As for ``transformers.pipeline``, such as ``batch_size`` and
            ``max_new_tokens``.

    Raises:
        ModelError: If the engine cannot run the model.
        PlanError: If the plan does not fit the model.
    """
    # Newer releases of transformers do this themselves, 5.2 does not.
    tokenizer.padding_side = "left"
    return PolicyPipeline(model=model, tokenizer=tokenizer, plan=plan, **options)
