"""Compiles the kernels of the exact mode for Hopper, without a GPU, and prints the matrix instructions of each as JSON.

A program of its own: where tests interpret kernels, Triton does not compile them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tripool.kernels.triton import experts, fp8_gemm, invariant_gemm

HOPPER = GPUTarget("cuda", 90, 32)
ROWS = (1, 17, 65, 129, 300, 1000, 4096)


def instructions(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> list[str]:
    """`types`: of the arguments that are not numbers; other ones are int32."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    compiled = compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})
    return sorted(set(re.findall(r"(?:wgmma\.mma_async|\bmma)\.\S*?(m\d+n\d+k\d+\S*)", compiled.asm["ptx"])))


def tiles(kind: str, *shape: int) -> str:
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}]>"


def products() -> dict[str, list[str]]:
    found = {}
    for t in {invariant_gemm.choose_invariant(rows, outs, 2048) for rows in ROWS for outs in (2048, 21888)}:
        types = {"x_desc": tiles("bf16", t.block_m, 64), "w_desc": tiles("bf16", t.block_n, 64), "parts": "*fp32"}
        types |= {"out": "*bf16", "bias": "*bf16", "arrived": "*i32"}
        constants = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": invariant_gemm.BLOCK_K, "SPLIT": t.split}
        constants |= {"BAND": t.band, "BIAS": False, "ADD": True, "PRECISION": "tf32", "EARLY": True}
        found[str(t)] = instructions(invariant_gemm.product_kernel, types, constants, t.num_warps, t.num_stages)
    return found


def e4m3_products() -> dict[str, list[str]]:
    found = {}
    for t in {fp8_gemm.choose_invariant(rows, 2048, 2048) for rows in ROWS}:
        types = {"x_desc": tiles("fp8e4nv", t.block_m, 128), "w_desc": tiles("fp8e4nv", t.block_n, 128)}
        types |= dict.fromkeys(("x_scale", "w_scale", "parts"), "*fp32") | {"out": "*bf16", "arrived": "*i32"}
        constants = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "BLOCK_K": 128, "SHARE": 128, "ONE": True}
        constants |= {"SPLIT": not t.fold, "FOLD": t.fold, "BAND": t.band, "EARLY": True}
        found[str(t)] = instructions(fp8_gemm.block_gemm_kernel, types, constants, t.num_warps, t.num_stages)
    return found


def gate_up() -> dict[str, list[str]]:
    found = {}
    for t in {experts.choose_tiling(6 * rows, 64, invariant=True) for rows in ROWS}:
        strip = t.gate_up
        types = dict.fromkeys(("x", "x_scale", "w_scale", "out"), "*bf16") | {"out_scale": "*fp32"}
        types |= dict.fromkeys(("experts", "pairs", "blocks", "num_blocks"), "*i32")
        types["w_desc"] = tiles("bf16", strip.block_n, strip.block_k)
        constants = {"BLOCK_M": t.block_m, "BLOCK_N": strip.block_n, "BLOCK_K": strip.block_k, "SHARE": 0, "TOP_K": 6}
        constants |= {"ONE": False, "DIRECT": False, "EARLY": True, "LEAST": 1e-30, "EVEN": True}
        found[str(t)] = instructions(experts.gate_up_kernel, types, constants, strip.num_warps, strip.num_stages)
    return found


if __name__ == "__main__":
    print(json.dumps([products(), e4m3_products(), gate_up()]))
