"""kvpolicy for people who live in transformers: a cache for `generate`, and what stands on it.

* ``model.generate(..., past_key_values=PolicyCache(model, plan))``;
* ``model.generate(..., custom_generate=kvpolicy.hf.generate, plan=plan)``;
* ``kvpolicy.hf.pipeline(model, tokenizer, plan)``, a text-generation pipeline.
"""

from kvpolicy.hf.generate import PolicyPipeline, generate, pipeline
from kvpolicy.hf.policy_cache import PolicyCache
from kvpolicy.hf.report import CacheReport

__all__ = ["CacheReport", "PolicyCache", "PolicyPipeline", "generate", "pipeline"]
