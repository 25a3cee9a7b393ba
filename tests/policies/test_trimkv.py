"""TRIM-KV against loops, against its authors' cache, and in the limits of its formulas."""

from pathlib import Path
from typing import Any

import pytest
import reference_trimkv as reference
import torch
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.trimkv.budgets import rows_over_heads, rows_over_model
from kvpolicy_plugins.trimkv.gates import load_gates
from safetensors.torch import save_file
from strategies import seeds
from torch import Tensor
from trimkv_gates import echo_gate, recorded_gate, states_for

from kvpolicy import CacheView, Engine, Plan, load_model, load_policy, select_rows
from kvpolicy.errors import KVPolicyError
from kvpolicy.testing import keep_rows, replay

CODE = {"newest_age": 2, "n_recent": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


def random_log_beta(*shape: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return -(torch.rand(shape, generator=rng) ** 3)


@recorded_related("trim_gate")
def test_gates_say_what_the_authors_gates_say(case: Case, folder: Path) -> None:
    arrays, args = case.arrays(), case.args
    tensors = recorded_gate(arrays)
    path = folder / "gate.safetensors"
    save_file(tensors, path, {"hidden_act": args["hidden_act"]})
    x = torch.from_numpy(arrays["x"])
    weights = {name: tensor.tolist() for name, tensor in tensors.items()}
    one = x[0, 0] if x.dim() == 3 else x[0, :, 0]
    if x.dim() == 4:
        size = args["head_dim"]
        keys, values = x[..., :size], x[..., size:]
        states = torch.zeros(args["B"], args["T"], args["D"])
        read = reference.read_by_rg2(one[:, :size].tolist(), one[:, size:].tolist())
    else:
        keys = values = torch.zeros(args["B"], args["Hkv"], args["T"], args["head_dim"])
        states, read = x, one.tolist()
    policy = load_policy("trimkv", gates=str(path), retention_gate=_form(case))
    for b in range(args["B"]):
        of_b = keys[b].transpose(0, 1), values[b].transpose(0, 1)
        (said,) = policy.annotate(0, states[b], *of_b).values()
        torch.testing.assert_close(said.T, torch.from_numpy(arrays["log_beta"][b]))
    loops = reference.gate_mlp if "gate_proj.weight" in weights else reference.gate_two_linear
    expected = arrays["log_beta"][0, :, 0].tolist()
    assert loops(weights, read) == pytest.approx(expected, rel=1e-4)


def _form(case: Case) -> str:
    function = case.args["about"]["function"]
    return {"RetentionGate2": "rg2", "RetentionGate3": "rg3"}.get(
        function.split(":")[1].split(".")[0], "rg"
    )


@recorded_related("trim_rounds")
def test_rounds_keep_the_rows_of_the_authors_cache(case: Case, folder: Path) -> None:
    arrays, args = case.arrays(), case.args
    lengths, seen = [], 0
    for tokens, is_compacted in zip(
        args["tokens_per_round"], args["compressed_in_round"], strict=True
    ):
        seen += tokens
        lengths += [seen] * is_compacted
    knobs = CODE | {
        "n_recent": args["sliding_window_size"],
        "key_norms": args["strategy"] == "knorm_alpha",
        "gates": echo_gate(folder / "echo.safetensors", args["Hkv"]),
    }
    compacted = [r for r, yes in enumerate(args["compressed_in_round"]) if yes]
    for layer in range(args["L"]):
        log_beta = torch.from_numpy(arrays["log_beta"][layer])
        keys = torch.from_numpy(arrays["keys"][layer])
        if not keys.numel():
            keys = torch.ones(*log_beta.shape, args["d"])
        kept = replay(
            "trimkv",
            keys,
            keys,
            keys,
            budget=args["memory_size"],
            prompt=args["tokens_per_round"][0],
            compact_at=lengths,
            states=states_for(log_beta),
            **knobs,
        )
        for positions, number in zip(kept, compacted, strict=True):
            expected = arrays[f"r{number}_positions_after"][layer]
            assert positions.tolist() == expected.tolist()


@recorded_related("trim_rounds")
def test_one_decision_of_given_retention_is_that_of_the_authors_cache(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    if args["strategy"] != "alpha":
        pytest.skip("the recorded keys are in the replay above")
    knobs = CODE | {"n_recent": args["sliding_window_size"]}
    policy = load_policy("trimkv", **knobs)
    seen = 0
    for number, tokens in enumerate(args["tokens_per_round"]):
        seen += tokens
        if not args["compressed_in_round"][number]:
            continue
        for layer in range(args["L"]):
            before = torch.from_numpy(arrays[f"r{number}_positions_before"][layer]).long()
            log_beta = torch.from_numpy(arrays["log_beta"][layer]).gather(2, before)
            rows = CacheView(
                positions=before,
                keys=torch.ones(*before.shape, 1),
                tracks={"trimkv_log_beta": log_beta},
                seq_len=torch.full((len(before),), seen),
            )
            keep = select_rows(policy, rows, budget=args["memory_size"]).keep
            expected = arrays[f"r{number}_positions_after"][layer]
            assert before.gather(2, keep).tolist() == expected.tolist()


@recorded_related("trim_global")
def test_one_budget_for_a_model_is_that_of_the_authors_cache(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    num_heads, threshold = args["Hkv"], None
    if "threshold" in args["strategy"]:
        threshold = args["alpha_threshold"]
    held: list[list[int]] = [[] for _ in range(args["L"] * num_heads)]
    log_beta = torch.from_numpy(arrays["log_beta"])[:, 0]  # [L, H_kv, T]
    log_norms = None
    if args["strategy"].startswith("knorm"):
        log_norms = torch.from_numpy(arrays["keys"])[:, 0].norm(dim=-1).log()
    seen = 0
    for number, tokens in enumerate(args["tokens_per_round"]):
        held = [[*rows, *range(seen, seen + tokens)] for rows in held]
        seen += tokens
        if args["evicted_in_round"][number]:
            scores = []
            for index, rows in enumerate(held):
                layer, head = divmod(index, num_heads)
                positions = torch.tensor(rows)
                worth = log_beta[layer, head][positions] * (seen + 1 - positions)
                if log_norms is not None:
                    worth = worth + log_norms[layer, head][positions]
                scores.append(worth)
            grouped = [scores[i : i + num_heads] for i in range(0, len(scores), num_heads)]
            masks = rows_over_model(
                grouped,
                memory=args["memory_size"],
                floor_ratio=args["floor_budget_ratio"],
                threshold=threshold,
                counting="code",
            )
            loops = reference.best_of_model(
                [one.tolist() for one in scores],
                args["memory_size"],
                args["floor_budget_ratio"],
                threshold,
                first_row_counts_before=True,
            )
            flat = [mask for layer in masks for mask in layer]
            assert [mask.nonzero().flatten().tolist() for mask in flat] == loops
            held = [
                torch.tensor(rows)[mask].tolist() for rows, mask in zip(held, flat, strict=True)
            ]
        lens = arrays[f"r{number}_head_lens"].flatten().tolist()
        assert [len(rows) for rows in held] == lens
        flat_rows = [position for rows in held for position in rows]
        assert flat_rows == arrays[f"r{number}_positions_flat"].flatten().tolist()


@given(
    seeds,
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.sampled_from(["exact", "code"]),
)
def test_one_budget_for_a_model_is_that_of_the_loops(
    seed: int, lengths: list[int], memory: int, floor_ratio: float, counting: str
) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = [-torch.rand(length, generator=rng) for length in lengths]
    masks = rows_over_model(
        [[one] for one in scores], memory=memory, floor_ratio=floor_ratio, counting=counting
    )
    loops = reference.best_of_model(
        [one.tolist() for one in scores], memory, floor_ratio, None, counting == "code"
    )
    assert [mask.nonzero().flatten().tolist() for (mask,) in masks] == loops


def test_the_code_counts_the_first_row_of_a_head_for_the_one_before() -> None:
    scores = [[torch.tensor([-0.1, -0.9, -0.5])], [torch.tensor([-0.2, -0.3, -0.8])]]

    def kept(counting: str) -> list[list[int]]:
        masks = rows_over_model(scores, memory=2, floor_ratio=0.5, counting=counting)
        return [mask.nonzero().flatten().tolist() for (mask,) in masks]

    assert kept("exact") == [[0, 2], [0, 1]]
    assert kept("code") == [[0, 1, 2], [0]]


def test_a_model_that_shares_a_budget_keeps_the_newer_of_equal_rows() -> None:
    (layer,) = rows_over_model([[torch.zeros(40)]], memory=3)
    assert layer[0].nonzero().flatten().tolist() == [37, 38, 39]


@given(
    seeds,
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([1, 4, 50]),
    st.booleans(),
    st.integers(4, 9),
)
def test_rounds_keep_the_rows_of_the_loops(
    folder: Path, seed: int, newest_age: int, n_recent: int, horizon: int, norms: bool, budget: int
) -> None:
    log_beta = random_log_beta(2, 2, 24, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, 24, 4, generator=rng) * 2
    lengths = [12, 15, 24]
    kept = replay(
        "trimkv",
        keys,
        keys,
        keys,
        budget=budget,
        prompt=12,
        compact_at=lengths,
        states=states_for(log_beta),
        gates=echo_gate(folder / "echo.safetensors", 2),
        newest_age=newest_age,
        n_recent=n_recent,
        horizon=horizon,
        key_norms=norms,
    )
    for b in range(2):
        for h in range(2):
            expected = reference.rounds(
                log_beta[b, h].tolist(),
                lengths,
                budget=budget,
                newest_age=newest_age,
                n_recent=n_recent,
                horizon=horizon,
                log_norms=keys[b, h].norm(dim=-1).log().tolist() if norms else None,
            )
            assert [positions[b, h].tolist() for positions in kept] == expected


@given(seeds, st.integers(1, 20), st.integers(0, 3), st.sampled_from([-torch.inf, -1.0]))
def test_heads_compete_as_in_the_loops(seed: int, rows: int, floor: int, least: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = -torch.randint(0, 6, (1, 3, 8), generator=rng).float() / 2  # with ties
    rows = max(rows, 3 * floor)
    present = torch.ones_like(scores, dtype=torch.bool)
    present[0, 1, :3] = False
    mask = rows_over_heads(scores, present, rows=rows, floor=floor, least=least)
    columns = [list(range(8)), list(range(3, 8)), list(range(8))]
    listed = [scores[0, h, columns[h]].tolist() for h in range(3)]
    # Loops compare columns, and heads have different numbers of them: count from the newest.
    shifted = [[-torch.inf] * (8 - len(head)) + head for head in listed]
    expected = reference.best_of_heads(shifted, rows, floor, max(least, -100.0))
    assert [mask[0, h].nonzero().flatten().tolist() for h in range(3)] == expected


@pytest.mark.parametrize("newest_age", [0, 1, 2])
def test_constant_retention_is_a_sliding_window(folder: Path, newest_age: int) -> None:
    log_beta = torch.full((1, 2, 40), -0.1)
    keys = torch.randn(1, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    inputs = {"budget": 6, "prompt": 20, "compact_at": [20, 23, 40]}
    kept = replay(
        "trimkv",
        keys,
        keys,
        keys,
        states=states_for(log_beta),
        gates=echo_gate(folder / "echo.safetensors", 2),
        newest_age=newest_age,
        **inputs,
    )
    window = replay("streaming", keys, keys, keys, n_sink=0, **inputs)
    assert [one.tolist() for one in kept] == [one.tolist() for one in window]


def test_the_age_of_the_newest_row_decides_as_in_the_paper_or_in_the_code() -> None:
    # Retention 0.5 of the newest row, and 0.9 of one that is five tokens older.
    rows = CacheView(
        positions=torch.tensor([[[4, 9]]]),
        keys=torch.ones(1, 1, 2, 1),
        tracks={"trimkv_log_beta": torch.tensor([[[0.9, 0.5]]]).log()},
    )
    kept = [
        select_rows(load_policy("trimkv", newest_age=age, n_recent=0), rows, budget=1).keep.item()
        for age in (0, 1, 2)
    ]
    assert kept == [1, 0, 0]


def test_equal_worth_goes_to_the_newer_row() -> None:
    rows = CacheView(
        positions=torch.arange(6).view(1, 1, 6),
        keys=torch.ones(1, 1, 6, 1),
        tracks={"trimkv_log_beta": torch.zeros(1, 1, 6)},
    )
    assert select_rows(load_policy("trimkv"), rows, budget=2).keep.tolist() == [[[4, 5]]]


def test_heads_share_a_budget_and_rows_below_the_threshold_leave() -> None:
    log_beta = torch.tensor([[[0.9, 0.9, 0.9, 0.9], [0.2, 0.3, 0.1, 0.5]]]).log()
    rows = CacheView(
        positions=torch.arange(4).expand(1, 2, 4),
        keys=torch.ones(1, 2, 4, 1),
        tracks={"trimkv_log_beta": log_beta},
    )

    def kept(**knobs: Any) -> list[list[bool]]:
        policy = load_policy("trimkv", **knobs)
        found = select_rows(policy, rows, budget=2, heads="shared").keep
        return [row.nonzero().flatten().tolist() for row in found[0]]

    assert kept() == [[1, 2, 3], [3]]
    assert kept(floor_ratio=1.0) == [[2, 3], [1, 3]]  # 0.3^3 is more than 0.1^2
    assert kept(threshold=0.75) == [[2, 3], [3]]


@pytest.mark.slow
def test_gates_of_the_reasoner_run_in_the_engine_with_and_without_a_shared_budget() -> None:
    model, tokenizer = load_model("reasoner")
    for heads in ("own", "shared"):
        policy = load_policy("trimkv", gates="reasoner")
        plan = Plan.uniform(policy, budget=24, buffer=8, heads=heads)
        engine = Engine(model, tokenizer, plan)
        (result,) = engine.generate(["12+7*3=" * 12], max_new_tokens=40, stop_ids=()).results()
        assert result.error is None
        assert result.rows_evicted > 0


def test_files_are_pinned_by_their_hash_and_refused_after_a_change(tmp_path: Path) -> None:
    name = echo_gate(tmp_path / "echo.safetensors", 2)
    pinned = load_policy("trimkv", gates=name).gates
    assert pinned.startswith(f"{name}#")
    assert load_policy("trimkv", gates=pinned).gates == pinned
    echo_gate(tmp_path / "echo.safetensors", 3)
    with pytest.raises(KVPolicyError, match=r"echo\.safetensors"):
        load_policy("trimkv", gates=pinned)


def test_gates_of_another_model_are_refused_in_one_sentence(folder: Path) -> None:
    keys = torch.ones(1, 3, 8, 4)
    with pytest.raises(KVPolicyError, match=r"2 KV heads.* 5 and 3"):
        keep_rows(
            "trimkv",
            keys,
            keys,
            keys,
            budget=4,
            states=torch.ones(1, 8, 5),
            gates=echo_gate(folder / "echo.safetensors", 2),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear2.weight": torch.ones(3, 4)}, "linear2.weight"),
        ({"linear3.weight": torch.ones(3, 4)}, "linear3.weight"),
        ({"bias": torch.tensor([0.0, torch.nan])}, "NaN"),
        ({"bias": None}, "bias"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    echo_gate(tmp_path / "echo.safetensors", 2)
    (gate,) = load_gates(str(tmp_path / "echo.safetensors")).by_layer.values()
    changed = {**gate.tensors, **change}
    tensors = {name: one for name, one in changed.items() if one is not None}
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(KVPolicyError, match=message):
        load_policy("trimkv", gates=str(tmp_path / "wrong.safetensors"))


def test_pickles_and_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"bias": torch.ones(2)}, tmp_path / "trimkv_weights.pth")
    with pytest.raises(KVPolicyError, match="pickle"):
        load_policy("trimkv", gates=str(tmp_path / "trimkv_weights.pth"))
    with pytest.raises(KVPolicyError, match=" reasoner"):
        load_policy("trimkv", gates="reasonr")


@pytest.mark.parametrize("form", ["rg2", "rg3"])
def test_gates_read_keys_and_values_of_different_sizes(form: str) -> None:
    """As latent attention has them; gates that are trained take the sizes of their file."""
    policy = load_policy("trimkv", retention_gate=form)
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(5, 2, 6, generator=rng), torch.randn(5, 2, 3, generator=rng)
    (rated,) = policy.annotate(0, torch.zeros(5, 4), keys, values).values()
    (other,) = policy.annotate(0, torch.zeros(5, 4), keys, values * 2).values()
    assert rated.shape == (5, 2)
    assert not torch.equal(rated, other)
