"""Results of requests in one process or on several tensor-parallel ranks.

`run_two_ranks` starts processes as torchrun does, each of which runs `main`; `start` is torchrun
itself.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, family_model
from fresh_process import start_fresh
from kvpolicy_reasoner import bundled_path
from strategies import BASES, SMALL_KNOBS, STEERING
from tiny import tiny_model, tiny_tokenizer
from torch import distributed as dist

from kvpolicy import Engine, Plan, Request, Sampling, installed_policies
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError
from kvpolicy.hf import PolicyCache
from kvpolicy.lab.tasks.task import load_task
from kvpolicy.model.loading import load_model
from kvpolicy.model.tensor_parallel import TensorParallelGroup

NAMES = [policy.name for policy in installed_policies() if policy.name not in STEERING]
#: Policies that read a layer's weights, of which each process has a part.
BINDING = ("expected_attention",)
_PATIENCE_S = 900
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
PROMPT_LENGTHS = (3, 29, 17, 8)  # one is longer than its slab, and two requests wait
#: Models that cannot be split, and a part of the error message.
REFUSED = {"three": "its 3 KV heads cannot be shared evenly by 2", "gpt2": "has no plan"}


def save_models(folder: Path) -> None:
    """Save small models with tokenizers."""
    models = {
        "llama": tiny_model("llama", num_heads=8, num_kv_heads=4),
        "qwen3": tiny_model("qwen3", num_heads=4, num_kv_heads=2, seed=1),
        "tied": tiny_model("qwen2", tie_word_embeddings=True, seed=2),
        "three": tiny_model("llama", num_heads=6, num_kv_heads=3),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


def save_families(folder: Path) -> None:
    """Save a model of every supported family, with windows longer than the slabs."""
    for name in FAMILIES:
        family_model(name, window=14).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


def run_two_ranks(folder: Path, what: str) -> list[dict[str, Any]]:
    """The results of `main` in two processes, over the loopback interface only."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", **_ENVIRONMENT}
    program = f"import sys, {__name__} as runs; runs.main(*sys.argv[1:])"
    ranks = []
    for rank in ("0", "1"):
        out, err = folder / f"rank-{rank}.out", folder / f"rank-{rank}.err"
        env = {"RANK": rank, "LOCAL_RANK": rank, **shared}
        ranks.append((start_fresh(program, folder, what, out=out, err=err, env=env), err))
    for process, err in ranks:
        process.join(_PATIENCE_S)
        assert process.exitcode == 0, err.read_text("utf-8")
    return [
        json.loads((folder / f"rank_results-{rank}.json").read_text("utf-8")) for rank in (0, 1)
    ]


def start(folder: Path, *args: object) -> "subprocess.CompletedProcess[str]":
    """Run a script or ``-m MODULE`` in two local processes, over the loopback interface only."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launcher += ["--local-addr", "127.0.0.1"]
    return subprocess.run(
        [*launcher, *map(str, args)],
        cwd=folder,
        env=os.environ | _ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """By policy name: a model and a plan."""
    found = {}
    for name in NAMES:
        knobs = SMALL_KNOBS.get(name, ({},))[0]
        first = ["h2o"] if name in ("skipkv_batches", *BASES) else []  # they need one that scores
        stack = [*first, {"policy": name, **knobs}]
        plan = {"stack": stack} if name == "full" else {"stack": stack, "budget": 12, "buffer": 5}
        found[name] = ("llama", plan)
    larger = {"stack": ["h2o"], "budget": 12, "buffer": 5, "prefill_buffer": 9}
    rows = {"keys": "int8", "values": "int4"}
    integers = {"stack": ["h2o", "merge"], "budget": 12, "buffer": 5, "rows": rows}
    return found | {"prefill_buffer": ("llama", larger), "integers": ("llama", integers)}


def family_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """By family name: its model and a plan whose policies combine all heads."""
    layers = [{"where": [0], "stack": ["h2o", "rerotate"]}, {"where": [1], "stack": ["tova"]}]
    return {name: (name, {"budget": 8, "buffer": 4, "layers": layers}) for name in FAMILIES}


@lru_cache
def model_in(folder: Path, name: str, dtype: torch.dtype = torch.float64) -> Any:
    together = "auto" if "RANK" in os.environ else None
    path = bundled_path(name) if name == "reasoner" else folder / name
    model, tokenizer = load_model(path, dtype=dtype, tp_plan=together)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(
            "eager"
        )  # grouped products do not support double precision
    return model, tokenizer


def answer(folder: Path, model_name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Run four requests in two slots; two of them sample their tokens.

    ``rows`` has hashes of the positions of every local head after every step.
    """
    model, _ = model_in(folder, model_name)
    engine = Engine(model, plan=Plan.from_dict(plan), slots=2, chunk=16)
    rng = torch.Generator().manual_seed(0)
    requests = [
        Request(
            torch.randint(61, (length,), generator=rng).tolist(),
            max_new_tokens=9 + index,
            sampling=Sampling(temperature=index % 2 * 0.9, seed=index),
        )
        for index, length in enumerate(PROMPT_LENGTHS)
    ]
    run = engine.generate(requests)
    results, rows = [], []
    while not run.done:
        results += run.step().results
        rows.append([_by_head(layer.positions) for layer in run.cache.layers])
    return {
        "results": [_plain(result) for result in sorted(results, key=lambda one: one.id)],
        "rows": rows,
        "peak_kv_bytes": run.report.peak_kv_bytes,
        "num_processes": run.report.num_processes,
    }


def _by_head(positions: torch.Tensor) -> list[str]:
    heads = positions.movedim(1, 0).contiguous().numpy()
    return [sha256(head.tobytes()).hexdigest()[:16] for head in heads]


def _plain(result: Any) -> dict[str, Any]:
    fields = result.to_dict()
    return {name: value for name, value in fields.items() if not name.endswith("_s")}


def steered(folder: Path) -> list[Any]:
    """Texts of the bundled reasoner with steering and sentence eviction."""
    model, tokenizer = model_in(folder, "reasoner")
    items = load_task("reasoner").examples(2, seed=1)
    found = []
    for plan in (Plan.load("skipkv-reasoner"), Plan.uniform("h2o", "seal", budget=48, buffer=16)):
        engine = Engine(model, tokenizer, plan, slots=2)
        run = engine.generate([item.prompt for item in items], max_new_tokens=40)
        found += [[result.text, result.rows_evicted] for result in run.results()]
    return found


def logits(folder: Path) -> list[float]:
    """Logits after one prompt, in single precision."""
    model, _ = model_in(folder, "llama", torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits[0, -1].tolist()


def generated(folder: Path, name: str) -> list[int]:
    """Tokens of ``model.generate`` with a `PolicyCache`."""
    model, _ = model_in(folder, name)
    cache = PolicyCache(model, Plan.uniform("tova", budget=12, buffer=5))
    ids = torch.arange(1, 30)[None]
    mask = torch.ones_like(ids)
    tokens = model.generate(
        ids, attention_mask=mask, **cache_argument(cache), max_new_tokens=12, do_sample=False
    )
    return tokens[0].tolist()


def refusal(folder: Path, name: str) -> str:
    try:
        model_in(folder, name)
    except ModelError as error:
        return str(error)
    return "it was loaded"


OTHERS: dict[str, Callable[[Path], Any]] = {
    "steered": steered,
    "logits": logits,
    "generated qwen3": lambda folder: generated(folder, "qwen3"),
    "generated tied": lambda folder: generated(folder, "tied"),
}


def main(path: str, what: str) -> None:
    """Run policy cases, with commas between them, and `OTHERS`; or ``families``, all of them.

    Each rank writes what it found to ``rank_results-RANK.json``.
    """
    folder, found = Path(path), dict[str, Any]()
    if what == "families":
        chosen = family_cases()
    else:
        chosen = {name: cases()[name] for name in what.split(",")}
        found |= {name: other(folder) for name, other in OTHERS.items()}
        found |= {f"refused {name}": refusal(folder, name) for name in REFUSED}
        rank = dist.get_rank()
        own = torch.tensor([40 + rank, 7])
        found["agreed"] = TensorParallelGroup(rank, 2, 2).same_tokens(own).tolist()
    for name, case in chosen.items():
        try:
            found[name] = answer(folder, *case)
        except ModelError as error:
            found[name] = str(error)
    (folder / f"rank_results-{dist.get_rank()}.json").write_text(json.dumps(found), "utf-8")
    dist.destroy_process_group()
