"""Record what classes of kvpress keep of the caches of tiny random models.

Writes arrays and ``manifest.json`` to ``related-kvpress/`` beside this file. kvpress needs
transformers below 5.3, so it has an environment of its own:

    python3 -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 kvpress==0.5.5
    kvpress-env/bin/python tests/golden/record_kvpress.py
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

FOLDER = Path(__file__).parent / "related-kvpress"
NUM_TOKENS, HEAD_DIM, LAYER = 60, 8, 1
RATIOS = (0.25, 0.5, 0.75)

# Name of the press, of the model, KV heads, arguments; AdaKV has those of the press below it, too.
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("KeyDiff", "Llama", 2, {}),
    ("KeyDiff", "Qwen3", 4, {}),
    ("AdaKV(KeyDiff)", "Llama", 4, {"alpha_safeguard": 0.2}),
    ("AdaKV(KeyDiff)", "Qwen2", 2, {"alpha_safeguard": 0.6}),
    ("AdaKV(SnapKV)", "Qwen3", 2, {"alpha_safeguard": 0.3, "window_size": 8, "kernel_size": 3}),
    ("AdaKV(SnapKV)", "Llama", 4, {"alpha_safeguard": 1.0, "window_size": 4, "kernel_size": 5}),
    ("ExpectedAttention", "Llama", 2, {}),
    ("ExpectedAttention", "Qwen2", 2, {"n_future_positions": 64, "n_sink": 0, "epsilon": 0.02}),
    ("ExpectedAttention", "Qwen3", 4, {"n_future_positions": 128, "use_vnorm": False}),
    ("ExpectedAttention", "Llama", 4, {"use_covariance": False, "n_sink": 2}),
    ("AdaKV(ExpectedAttention)", "Qwen2", 4, {"alpha_safeguard": 0.2, "epsilon": 0.01}),
]

MEANINGS = {
    "K": "[1,Hkv,T,d] keys after RoPE",
    "V": "[1,Hkv,T,d] values",
    "Q": "[1,Hq,T,d] queries after RoPE",
    "hidden_states": "[1,T,M] input of the attention",
    "q_weight": "[Hq*d,M] projection to queries",
    "q_bias": "[Hq*d] its bias (Qwen2)",
    "q_norm_weight": "[d] RMS norm of queries before RoPE (Qwen3), eps 1e-6",
    "inv_freq": "[d/2] inverse frequencies of RoPE; attention_scaling is 1",
    "score": "[1,Hkv,T] score of the press, the same for all ratios",
    "base_score": "[1,Hkv,T] score of the press below AdaKV, before it changed it",
    "rNN_kept": "[1,Hkv,n] rows that stay at compression_ratio NN/100, rising",
    "rNN_keep_mask": "[1,Hkv,T] True for rows that stay; AdaKV masks the others",
}


def model_of(family: str, num_kv_heads: int, seed: int) -> Any:
    """A random decoder of two layers."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(std=0.5)
        if "q_norm" in name:
            weight.data.normal_(mean=1.0, std=0.3)
    return model


def press_of(name: str, arguments: dict[str, Any]) -> Any:
    """A press, or AdaKV over one."""
    inner = name.removeprefix("AdaKV(").removesuffix(")")
    own = {key: value for key, value in arguments.items() if key != "alpha_safeguard"}
    press = getattr(kvpress, f"{inner}Press")(**own)
    if inner == name:
        return press
    return kvpress.AdaKVPress(press, alpha_safeguard=arguments["alpha_safeguard"])


def recorded(press: Any, model: Any, token_ids: Tensor) -> dict[str, Tensor]:
    """What a press was given in one layer, what it answered, and which rows stay."""
    arrays: dict[str, Tensor] = {}
    scorer = getattr(press, "press", press)
    score, compress = scorer.score, press.compress

    def recording_score(*args: Any) -> Tensor:
        scores: Tensor = score(*args)
        arrays["base_score" if scorer is not press else "score"] = scores.clone()
        return scores

    def recording_compress(module: Any, states: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        keys, values, _, kwargs = args
        kept_keys, kept_values = compress(module, states, *args)
        if module.layer_idx == LAYER:
            arrays.update(K=keys, V=values, hidden_states=states)
            arrays["Q"] = rotated_queries(module, states, kwargs["position_embeddings"])
            if scorer is press:
                same = (kept_keys[:, :, :, None] == keys[:, :, None]).all(dim=-1)
                arrays["kept"] = same.long().argmax(dim=-1).sort().values
            else:
                mask = torch.ones(keys.shape[:3], dtype=torch.bool)
                mask[module.masked_key_indices] = False
                arrays["keep_mask"] = mask
        return kept_keys, kept_values

    scorer.score, press.compress = recording_score, recording_compress
    with torch.no_grad(), press(model):
        model(token_ids, past_key_values=transformers.DynamicCache())
    return arrays


def rotated_queries(module: Any, states: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
    queries = module.q_proj(states).unflatten(-1, (-1, HEAD_DIM))
    if hasattr(module, "q_norm"):
        queries = module.q_norm(queries)
    queries = queries.transpose(1, 2)
    rotated: Tensor = apply_rotary_pos_emb(queries, queries, *embeddings)[0]
    return rotated


def record(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of one case, and its arguments."""
    name, family, num_kv_heads, arguments = CASES[seed]
    arrays: dict[str, Tensor] = {}
    for ratio in RATIOS:
        model = model_of(family, num_kv_heads, seed)  # AdaKV leaves masks in a model
        token_ids = torch.randint(64, (1, NUM_TOKENS))
        press = press_of(name, arguments)
        press.compression_ratio = ratio
        found = recorded(press, model, token_ids)
        for kind in ("kept", "keep_mask"):
            if kind in found:
                arrays[f"r{ratio * 100:.0f}_{kind}"] = found.pop(kind)
        assert all(torch.equal(arrays.setdefault(key, new), new) for key, new in found.items())
    attention = model.model.layers[LAYER].self_attn
    arrays["q_weight"] = attention.q_proj.weight
    if attention.q_proj.bias is not None:
        arrays["q_bias"] = attention.q_proj.bias
    if hasattr(attention, "q_norm"):
        arrays["q_norm_weight"] = attention.q_norm.weight
    arrays["inv_freq"] = model.model.rotary_emb.inv_freq
    sizes = {"T": NUM_TOKENS, "Hq": 4, "Hkv": num_kv_heads, "d": HEAD_DIM}
    about = {"press": name, "press_args": arguments, "ratios": RATIOS, "seed": seed}
    return arrays, {**about, **sizes, "model": family}


def cases() -> Iterator[dict[str, Any]]:
    """Write the files, and describe them."""
    for seed in range(len(CASES)):
        arrays, args = record(seed)
        file = f"kvpress_{seed:02}.npz"
        np.savez_compressed(
            FOLDER / file, **{key: one.detach().numpy() for key, one in arrays.items()}
        )
        shapes = {key: list(one.shape) for key, one in arrays.items()}
        yield {"file": file, "system": "kvpress", "args": args, "arrays": shapes}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    packages = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    manifest = {
        "what": "Rows that classes of kvpress keep in layer 1 of random models of two layers.",
        "command": "python tests/golden/record_kvpress.py",
        "versions": packages,
        "arrays": MEANINGS,
        "cases": list(cases()),
    }
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
