"""`PolicyCache` in ``custom_generate`` and in text-generation pipelines."""

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TextGenerationPipeline
from transformers.generation.configuration_utils import GenerationMode

from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.errors import CacheError, KVPolicyError, shown
from kvpolicy.hf.policy_cache import CacheReport, PolicyCache
from kvpolicy.plan.plan import Plan

# The loops of transformers for each mode; they have no public names.
_LOOPS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    generation_config: GenerationConfig,
    plan: Plan | None = None,
    **arguments: Any,
) -> Any:
    """Generate within a plan: for ``model.generate(..., custom_generate=generate, plan=plan)``.

    `generate` prepares inputs, logits processors and stopping criteria as usual, and its own
    loop chooses the tokens. It passes no ``streamer`` and no ``tokenizer`` to functions of this
    kind: to use those, pass a `PolicyCache` to `generate`.

    Args:
        model: The model.
        input_ids: Prompts, ``[B, columns]``, padded on the left.
        generation_config: How to generate: greedy, sampling, or with beams.
        plan: The plan; not needed with a `PolicyCache`.
        arguments: What `generate` passes to every function of this kind. Its cache is a
            `PolicyCache` to continue, or the empty cache that `generate` has made, which is not
            used.

    Returns:
        What `generate` returns.

    Raises:
        CacheError: For other modes of generation, or if prompts do not continue the cache.
    """
    mode = generation_config.get_generation_mode()
    if mode not in _LOOPS:
        msg = (
            f"kvpolicy.hf.generate does not support {mode.value.replace('_', ' ')}; use greedy "
            "search, sampling or beam search"
        )
        raise CacheError(msg)
    # Not a parameter: generate would pass it on without preparing it.
    cache = cache_in(arguments)
    if isinstance(cache, PolicyCache):
        cache.check_prompt(input_ids, arguments.get("attention_mask"))
    else:
        if cache is not None and cache.get_seq_length():
            msg = (
                "kvpolicy.hf.generate was given a cache of transformers that is not empty; leave "
                "it out, or continue with a PolicyCache"
            )
            raise CacheError(msg)
        length = generation_config.max_length
        arguments |= cache_argument(PolicyCache(model, plan, max_length=length))
    loop = getattr(model, _LOOPS[mode])
    return loop(input_ids, generation_config=generation_config, **arguments)


class PolicyPipeline(TextGenerationPipeline):
    """A text-generation pipeline that uses a new `PolicyCache` for every batch.

    Attributes:
        plan: The plan.
        report: Report of the newest batch; ``None`` before the first.
    """

    def __init__(self, *args: Any, plan: Plan, **options: Any) -> None:
        """See `TextGenerationPipeline`.

        Args:
            args: Arguments of `TextGenerationPipeline`.
            plan: The plan.
            options: Further arguments of `TextGenerationPipeline`.
        """
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self.plan = plan
        self.report: CacheReport | None = None
        # Raises now if the plan does not fit the model.
        PolicyCache(self.model, plan, self.tokenizer)

    def _forward(self, model_inputs: Any, **options: Any) -> Any:  # type: ignore[override]
        cache = PolicyCache(self.model, self.plan, self.tokenizer)
        options |= cache_argument(cache)
        answer = super()._forward(model_inputs, **options)  # type: ignore[no-untyped-call]
        self.report = cache.report
        return answer


def pipeline(model: PreTrainedModel, tokenizer: Any, plan: Plan, **options: Any) -> PolicyPipeline:
    """A text-generation pipeline whose caches are kept within a plan.

    Args:
        model: A decoder-only transformers model.
        tokenizer: Its tokenizer; set to pad on the left.
        plan: The plan.
        options: As for ``transformers.pipeline``, such as ``batch_size`` and
            ``max_new_tokens``.

    Raises:
        ModelError: If the engine cannot run the model.
        PlanError: If the plan does not fit the model.
    """
    if not hasattr(tokenizer, "padding_side"):
        msg = (
            f"the pipeline was given {shown(tokenizer)} for a tokenizer; write model, tokenizer = "
            "load_model(NAME)"
        )
        raise KVPolicyError(msg)
    # Newer releases of transformers do this themselves.
    tokenizer.padding_side = "left"
    return PolicyPipeline(model=model, tokenizer=tokenizer, plan=plan, **options)
