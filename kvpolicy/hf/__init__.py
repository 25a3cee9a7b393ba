"""kvpolicy within transformers: a cache for `generate`, and what is built on it.

* ``model.generate(..., past_key_values=PolicyCache(model, plan))``;
* ``model.generate(..., custom_generate=kvpolicy.hf.generate, plan=plan)``;
* ``kvpolicy.hf.pipeline(model, tokenizer, plan)``, a text-generation pipeline.
"""

from kvpolicy.hf.generate import PolicyPipeline, generate, pipeline
from kvpolicy.hf.policy_cache import CacheReport, PolicyCache

__all__ = ["CacheReport", "PolicyCache", "PolicyPipeline", "generate", "pipeline"]
