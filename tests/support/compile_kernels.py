"""Compile kernels for sm_90 (H100) without a GPU, and print what each became, as JSON.

The interpreter lets through what the compiler refuses. A program of its own, because kernels are
either interpreted or compiled in a process. The shapes are those of Qwen3-8B: 32 query and 8 KV
heads of 128 in bf16, slabs of 1,152 rows.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from math import gcd
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpolicy.attention.integers import bytes_of_row, group_size
from kvpolicy.attention.triton_backend import append as triton_append
from kvpolicy.attention.triton_backend import compact as triton_compact
from kvpolicy.attention.triton_backend import decode as triton_decode
from kvpolicy.attention.triton_backend import prompts as triton_prompts
from kvpolicy.model.fused import triton_kernels as fused
from kvpolicy.toolkit import triton_redundancy
from kvpolicy.triton_common import rows_at_once


def rows_of(
    key_bits: int, value_bits: int, dim: int = 128, value_dim: int = 128, exact: int = 32
) -> dict[str, int]:
    """The form of rows, see `stored_rows.forms_of`."""
    found = {}
    for of_dim, name, bits, size in (
        ("", "KEY", key_bits, dim),
        ("VALUE_", "VALUE", value_bits, value_dim),
    ):
        found |= {
            f"{of_dim}DIM": size,
            f"{of_dim}DIM_BLOCK": max(triton.next_power_of_2(size), 16),
            f"{name}_BITS": bits,
            f"{name}_SIZE": group_size(size, bits),
            f"{name}_UNIT": gcd(16, bytes_of_row(size, bits)) if bits else 1,
            f"{name}_EXACT": exact if bits == 4 else 0,
        }
    return found


def block_of(form: dict[str, int]) -> int:
    """Rows that are attended to at once, see `triton_decode.attend`."""
    block = rows_at_once(max(form["DIM"], form["VALUE_DIM"]), 2)
    return block // 2 if 4 in (form["KEY_BITS"], form["VALUE_BITS"]) else block


PLAIN_ROWS = rows_of(0, 0)
SHAPE = {"CAPACITY": 1152, "HEADS": 8, "RAGGED": False}
SEGMENTS = {**SHAPE, "RAGGED": True}
GROUP = {"GROUP": 4, "GROUP_BLOCK": 16}
VALUES = {"VALUE_DIM": 128, "VALUE_DIM_BLOCK": 128}
CHUNKS = {"CHUNKS": 3, "CHUNK": 384, "BLOCK": 64, "ACCUMULATED": 512}
POOL_CHUNKS = CHUNKS | {"CHUNKS": 24}
JOINED = {**CHUNKS, "PARTS": 4}
APPEND = {
    "CAPACITY": 1152,
    **GROUP,
    "GROUP_BLOCK": 4,
    "WINDOW_SIZE": 8,
    "SLIDES": True,
    "RESCALED": True,
}
MOVE = {"FILL": 0, "DIM": 128, "COLUMNS": 32, "BLOCK": 64}
COMPACT = {**MOVE, "HEADS": 8}
RKV = {"HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "BLOCK": 64}
TRACKS = ("SUMS", "SQUARES", "SQUARES_LOGIT", "SQUARES_LOGIT2")
NO_TRACKS = {"SINKS": False, **dict.fromkeys(TRACKS, False)}
SUMS = NO_TRACKS | {"SUMS": True}
EVERY_TRACK = {"SINKS": True, **dict.fromkeys(TRACKS, True)}
GEMMA = {"SOFTCAP": 50.0, "SLIDING_WINDOW": 1024, "TENSOR_CORES": True}
PLAIN = {"SOFTCAP": 0.0, "SLIDING_WINDOW": 0, "TENSOR_CORES": True}
IN_32_BITS = {"TENSOR_CORES": False, "GROUP": 8, "GROUP_BLOCK": 16, "BLOCK": rows_at_once(128, 4)}
ONE_CHUNK = CHUNKS | {"CHUNKS": 1, "CHUNK": 1152, "ACCUMULATED": 1024}

ROW = {"SIZE": 4096, "BLOCK": 4096}
HEADS = {"QUERY_HEADS": 32, "KEY_HEADS": 8, "DIM": 128, "HALF_BLOCK": 64}

# Types of what a kernel is given, by the names of its arguments. All other names are strides.
TYPES = {
    "*bf16": "query key value keys values exact_keys exact_values window out sinks slab "
    "logits states added weight total cos sin query_weight key_weight query_out key_out gate up "
    "beside",
    "*fp32": "sums squares squares_logit squares_logit2 chunk_top chunk_total chunk_output "
    "inverse_norms unit_sums similarity totals divisors",
    "*i64": "sizes positions rows seq_len keep slots start lanes num_kept num_rows bounds",
    "*i32": "exempt",
    "*u8": "live",
    "fp32": "scaling factor threshold eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}

PROMPTS = {"HEADS": 32, "GROUP": 4, "DIM": 128, "DIM_BLOCK": 128, "QUERIES": 64}
PROMPTS |= {"SOFTCAP": 0.0, "WINDOW": False}
CAPPED = {"SOFTCAP": 50.0, "WINDOW": True}
LONG_HEADS = {"DIM": 256, "DIM_BLOCK": 256, "QUERIES": 32}
SUMS_ALONE = dict.fromkeys(TRACKS, False) | {"SUMS": True}

from_prompts, add_up = triton_prompts._attend_queries, triton_prompts._add_up
attend, join = triton_decode._attend_chunk, triton_decode._join_chunks
# Keys and values that are stored in other forms, and heads of other sizes.
IN_FORMS = {
    "in 8 bits": rows_of(8, 8),
    "in 8 and 4 bits": rows_of(8, 4),
    "in 4 bits": rows_of(4, 4),
    "in 8 bits with plain values": rows_of(8, 0),
    "of 64 in 4 bits": rows_of(4, 4, dim=64, value_dim=64),
    "of 96 and 64": rows_of(0, 0, dim=96, value_dim=64),
    "of 256": rows_of(0, 0, dim=256, value_dim=256),
}
KERNELS = {
    "attend": (attend, {**SHAPE, **PLAIN_ROWS, **GROUP, **CHUNKS, **PLAIN, **NO_TRACKS}),
    "attend with sums": (attend, {**SHAPE, **PLAIN_ROWS, **GROUP, **CHUNKS, **PLAIN, **SUMS}),
    "attend with short heads": (
        attend,
        {**SHAPE, **rows_of(0, 0, dim=8, value_dim=8), **GROUP, **CHUNKS, **PLAIN, **NO_TRACKS},
    ),
    **{
        f"attend to rows {name}": (
            attend,
            {**SHAPE, **form, **GROUP, **CHUNKS, **PLAIN, **SUMS, "BLOCK": block_of(form)},
        )
        for name, form in IN_FORMS.items()
    },
    "attend in 32 bits": (
        attend,
        {**SHAPE, **PLAIN_ROWS, **CHUNKS, **PLAIN, **SUMS, **IN_32_BITS},
    ),
    **{
        f"append rows {name}": (triton_append._append, {**APPEND, **form, "RAGGED": False})
        for name, form in IN_FORMS.items()
    },
    "attend in a window": (attend, {**SHAPE, **PLAIN_ROWS, **GROUP, **CHUNKS, **GEMMA, **SUMS}),
    "attend alone": (attend, {**SHAPE, **PLAIN_ROWS, **GROUP, **ONE_CHUNK, **PLAIN, **NO_TRACKS}),
    "attend alone with sums": (
        attend,
        {**SHAPE, **PLAIN_ROWS, **GROUP, **ONE_CHUNK, **PLAIN, **SUMS},
    ),
    "attend alone with every track and sinks": (
        attend,
        {**SHAPE, **PLAIN_ROWS, **GROUP, **ONE_CHUNK, **GEMMA, **EVERY_TRACK},
    ),
    "join": (join, {**SHAPE, **VALUES, **GROUP, **JOINED, **NO_TRACKS}),
    "join with sums": (join, {**SHAPE, **VALUES, **GROUP, **JOINED, **SUMS}),
    "join with every track and sinks": (
        join,
        {**SHAPE, **VALUES, **GROUP, **JOINED, **EVERY_TRACK},
    ),
    "attend in segments": (
        attend,
        {**SEGMENTS, **PLAIN_ROWS, **GROUP, **POOL_CHUNKS, **PLAIN, **SUMS},
    ),
    "join in segments": (
        join,
        {**SEGMENTS, **VALUES, **GROUP, **POOL_CHUNKS, "PARTS": 32, **EVERY_TRACK},
    ),
    "append": (triton_append._append, {**APPEND, **PLAIN_ROWS, "RAGGED": False}),
    "append in segments": (
        triton_append._append,
        {**APPEND, **PLAIN_ROWS, "SLIDES": False, "RAGGED": True},
    ),
    "compact": (triton_compact._compact, {**COMPACT, "STARTS": False, "BESIDE": False}),
    "compact behind prompts": (
        triton_compact._compact,
        {**COMPACT, "STARTS": True, "BESIDE": False},
    ),
    "compact from a staging area": (
        triton_compact._compact,
        {**COMPACT, "STARTS": False, "BESIDE": True},
    ),
    "drop oldest": (triton_compact._drop_oldest, {**MOVE, "CAPACITY": 1152}),
    "attend from prompts": (from_prompts, {**PROMPTS, **VALUES, "ROWS": 32, "SINKS": False}),
    "attend from prompts in a window": (
        from_prompts,
        {**PROMPTS, **VALUES, **CAPPED, "ROWS": 32, "SINKS": True},
    ),
    "attend from prompts with long heads": (
        from_prompts,
        {
            **PROMPTS,
            **LONG_HEADS,
            "VALUE_DIM": 256,
            "VALUE_DIM_BLOCK": 256,
            "ROWS": 16,
            "SINKS": False,
        },
    ),
    "add up": (add_up, {**PROMPTS, "ROWS": 64, **SUMS_ALONE}),
    "add up in a window with every track": (
        add_up,
        {**PROMPTS, **CAPPED, "ROWS": 64, **dict.fromkeys(TRACKS, True)},
    ),
    "add up with long heads": (add_up, {**PROMPTS, **LONG_HEADS, "ROWS": 32, **SUMS_ALONE}),
    "units": (triton_redundancy._units, {**RKV, "EPSILON": 1e-8}),
    "exempt pairs": (triton_redundancy._exempt_pairs, {**RKV, "FIRST": False}),
    "exempt pairs of 256": (
        triton_redundancy._exempt_pairs,
        {**RKV, "DIM": 256, "DIM_BLOCK": 256, "BLOCK": rows_at_once(256, 2), "FIRST": False},
    ),
    "exempt pairs in 32 bits": (
        triton_redundancy._exempt_pairs,
        {**RKV, "BLOCK": rows_at_once(128, 4), "FIRST": False},
    ),
    "totals": (triton_redundancy._totals, RKV),
    "norm": (fused._norm, {**ROW, "ADDS": False}),
    "norm of a sum": (fused._norm, {**ROW, "ADDS": True}),
    "norm of a sum of long rows": (fused._norm, {"SIZE": 12288, "BLOCK": 16384, "ADDS": True}),
    "rotate": (fused._rotate, {**HEADS, "NORM": False}),
    "rotate after norms": (fused._rotate, {**HEADS, "NORM": True}),
    "gate": (fused._gate, {"SIZE": 12288, "BLOCK": 1024}),
}
# Those whose products are rounded before they are added.
ROUNDED = (fused._rotate,)
WARPS = {
    "norm": 8,
    "norm of a sum": 8,
    "norm of a sum of long rows": 16,
    "rotate": 1,
    "rotate after norms": 1,
}


def compiled(kernel, constants: dict, warps: int, of_numbers: str = "*bf16") -> dict:
    """What a kernel needs of a GPU: bytes of code and shared memory, registers, stack."""
    names = kernel.arg_names
    missing = constants.keys() - set(names)
    assert not missing, f"the kernel has no {missing}"
    types = {name: of_numbers if kind == "*bf16" else kind for name, kind in TYPE_OF.items()}
    in_bytes = [f"{one.lower()}s" for one in ("KEY", "VALUE") if constants.get(f"{one}_BITS")]
    types |= dict.fromkeys(in_bytes, "*u8")
    signature = {name: types.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    # Tensors begin at, and strides are, multiples of 16, as Triton finds when it is called.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and (name not in types or types[name].startswith("*"))
        if not kernel.params[index].do_not_specialize
        # Strides of slabs in bytes are those of a few of them, see `stored_rows.strides_of`.
        if not any(name.startswith(f"{slab}_") for slab in in_bytes)
        if name in ("slab_row", "keys_row", "values_row")
        or (not name.endswith("_row") and name not in ("rows_slot", "bounds_slot"))
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": warps, "enable_fp_fusion": kernel not in ROUNDED}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "kernel": kernel.fn.__name__,
        "warps": warps,
        "cubin": len(built.asm["cubin"]),
        "shared": built.metadata.shared,
        **resources(built.asm["cubin"]),
        "tensor_cores": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", built.asm["ptx"])),
        "fused": len(re.findall(r"\bfma\.", built.asm["ptx"])),
        "single_bytes": len(re.findall(r"\bld\.global\.[bus]8\b", built.asm["ptx"])),
        "accesses": re.findall(r"\b(?:ld\.global|st\.global|bar\.sync)\b", built.asm["ptx"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, where registers are spilled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b([A-Z]+):(\d+)", text))
    return {"registers": int(usage["REG"]), "stack": int(usage["STACK"])}


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "interpreted kernels cannot be compiled"
    report = {
        name: compiled(
            kernel, constants, WARPS.get(name, 4), "*fp32" if "in 32 bits" in name else "*bf16"
        )
        for name, (kernel, constants) in KERNELS.items()
    }
    json.dump(report, sys.stdout)
