"""Whole models with gates: the engine writes what the authors' model writes."""

from pathlib import Path

import torch
from golden_cases import Case, recorded_related
from recorder import Recorder
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvpolicy import Engine, Plan, load_policy

GATE = "retention_gate"


@recorded_related("trim_e2e")
def test_the_engine_writes_and_keeps_what_the_authors_model_does(
    case: Case, tmp_path: Path
) -> None:
    arrays, args = case.arrays(), case.args
    sizes = args["config"]
    weights = {
        name[2:]: torch.from_numpy(array).float() * args["scales"][name[2:]]
        for name, array in arrays.items()
        if name.startswith("w:")
    }
    gates = {name: weights.pop(name) for name in list(weights) if GATE in name}
    save_file(gates, tmp_path / "gates.safetensors")
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["D"],
            intermediate_size=sizes["I"],
            num_hidden_layers=sizes["L"],
            num_attention_heads=sizes["Hq"],
            num_key_value_heads=sizes["Hkv"],
            head_dim=sizes["d"],
            rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
            rms_norm_eps=sizes["rms_norm_eps"],
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    policy = load_policy(
        "trimkv",
        gates=str(tmp_path / "gates.safetensors"),
        newest_age=2,
        whole_prompt=True,
        n_recent=args["sliding_window_size"],
        key_norms=args["strategy"] == "knorm_alpha",
    )
    # The authors compact when memory and buffer are full, as we do; without a buffer, every step.
    buffer, recorder = max(1, args["buffer_size"]), Recorder()
    plan = Plan.uniform(policy, recorder, budget=args["memory_size"], buffer=buffer)
    prompt, steps = arrays["prompt"][0].tolist(), args["steps"]
    run = Engine(model, None, plan).generate([prompt], max_new_tokens=steps + 1, stop_ids=())
    (result,) = run.results()
    assert result.tokens[:steps] == tuple(arrays["tokens"].tolist())
    for layer in range(sizes["L"]):
        compactions = recorder.records[0].of_layer(layer)
        assert len(compactions) > 3
        for one in compactions:
            step = one.seq_len - len(prompt)
            name = f"positions_after_step{step:02}" if step else "positions_after_prompt"
            assert one.kept.tolist() == arrays[name][layer, 0].tolist()
