"""Prompts with a prefix store on each of several tensor-parallel ranks, and without one.

Run by torchrun in a folder with a model ``llama``: each rank writes ``reuse-RANK.json``.
"""

import json
import os
from pathlib import Path

from torch import distributed as dist

from kvpolicy import Engine, Plan, PrefixStore
from kvpolicy.errors import KVPolicyError
from kvpolicy.model.loading import load_model

if __name__ == "__main__":
    model, tokenizer = load_model("llama", tp_plan="auto")
    plan = Plan.uniform("rkv", budget=12, buffer=4, prompt="keep")
    store = PrefixStore(50_000, block_tokens=4)
    prompts = [[*range(20), question, 3] for question in range(6)]
    plain = Engine(model, tokenizer, plan, slots=2).generate(prompts, max_new_tokens=12).results()
    engine, found = Engine(model, tokenizer, plan, slots=2, prefix_store=store), []
    for _ in range(2):
        results = engine.generate(prompts, max_new_tokens=12).results()
        found.append([(one.tokens, one.reused_tokens) for one in results])
    refusal, rank = "", os.environ["RANK"]
    try:
        Engine(model, tokenizer, plan, prefix_store=PrefixStore(1000, spill=f"spilled-{rank}"))
    except KVPolicyError as error:
        refusal = str(error)
    content = {"plain": [one.tokens for one in plain], "found": found, "refusal": refusal}
    content["stats"] = store.stats.to_dict()
    Path(f"reuse-{rank}.json").write_text(json.dumps(content))
    dist.destroy_process_group()
    os._exit(0)  # threads of torch may abort a process while the interpreter ends
