"""The time of one operator: bytes over bandwidth or operations over rate, whichever is longer, as far as reached."""

from __future__ import annotations

from tripool.planner.hardware.describe import WEIGHT_BYTES, Hardware


def gemm_s(hardware: Hardware, params: float, rows: float, precision: str, *, lost_rows: float = 0.0) -> float:
    """`rows` of activations through `params` weights that are read once. `lost_rows`: to tiles and pipeline."""
    read_s = params * WEIGHT_BYTES[precision] / (hardware.hbm_bytes_per_s * hardware.memory_share)
    return max(read_s, 2.0 * params * (rows + lost_rows) / (hardware.flops[precision] * hardware.gemm_share))


def memory_s(hardware: Hardware, num_bytes: float) -> float:
    return num_bytes / (hardware.hbm_bytes_per_s * hardware.memory_share)


def attention_s(hardware: Hardware, flops: float, num_bytes: float) -> float:
    """Scores and values in BF16; compute-bound with many heads per cached byte, else bound by reading the cache."""
    compute_s = flops / (hardware.flops["bf16"] * hardware.attention_compute_share)
    return max(compute_s, num_bytes / (hardware.hbm_bytes_per_s * hardware.attention_memory_share))
