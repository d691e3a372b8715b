"""Cost of dispatch and combine over the planes, and of tensor-parallel reductions. Seconds per layer and microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from tripool.planner.hardware import INT4, Hardware, Plane
from tripool.planner.models import ModelShape
from tripool.planner.models.shape import Moe

SCALE_BYTES = 512  # a quantised token's scales, padded, as published: 7,168 + 512 bytes


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`fixed_s`: latency that takes nothing from compute; `bytes_s`: transfer, which takes cores and memory bandwidth;
    `dispatch`: its share.
    """

    fixed_s: float
    bytes_s: float
    dispatch_s: float
    combine_s: float


def message_bytes(model: ModelShape, precision: str) -> tuple[int, int]:
    """(dispatch, combine) bytes of one token: dispatched in 8 bits (4 where weights have 4), combined in BF16."""
    dispatched = {"bf16": 2 * model.hidden, INT4: 2 * model.hidden, "fp4": model.hidden // 2 + SCALE_BYTES}
    return dispatched.get(precision, model.hidden + SCALE_BYTES), 2 * model.hidden


def decode_exchange(
    hardware: Hardware, model: ModelShape, precision: str, *, ep: int, tokens: float, hot_tokens: float
) -> Exchanged:
    """Each rank sends `tokens`; the busiest one receives `hot_tokens` and sends as many back. A copy is a message."""
    plane, remote = _plane_of(hardware, ep)
    most = hardware.exchange.decode_gb_s * 1e9 if plane.kind == "memory" else float("inf")
    sender_s = tokens * hardware.exchange.token_us * 1e-6
    return _exchanged(hardware, model, precision, ep, hot_tokens * remote, sender_s, most=most)


def prefill_exchange(
    hardware: Hardware, model: ModelShape, precision: str, *, ep: int, tokens: float, hot: float
) -> Exchanged:
    """Over a slow plane a token crosses once per node, for any number of experts there."""
    assert model.moe is not None
    plane, remote = _plane_of(hardware, ep)
    copies = model.moe.top_k * remote
    if plane.kind == "transfer":
        nodes = ep / hardware.domain_ranks
        copies = nodes_touched(model.moe, nodes) * (nodes - 1) / nodes
    return _exchanged(hardware, model, precision, ep, tokens * hot * copies)


def _exchanged(
    hardware: Hardware, model: ModelShape, precision: str, ep: int, messages: float, sender_s: float = 0.0, *,
    most: float = float("inf"),
) -> Exchanged:  # fmt: skip
    """`messages`: that cross the limiting plane, out and back; `sender_s`: the sender's own time; `most`: rate that
    the kernels reach, per chip.
    """
    if ep == 1:
        return Exchanged(0.0, 0.0, 0.0, 0.0)
    plane, _ = _plane_of(hardware, ep)
    fixed_us = hardware.exchange.near_us if plane.kind == "memory" else hardware.exchange.fixed_us
    fixed_s = (fixed_us + hardware.exchange.per_peer_us * ep) * 1e-6
    rate = min(plane.bytes_per_s, most) / hardware.ranks
    out_s, back_s = (messages * size / rate for size in message_bytes(model, precision))
    out_s += sender_s
    return Exchanged(2 * fixed_s, out_s + back_s, fixed_s + out_s, fixed_s + back_s)


def nodes_touched(moe: Moe, nodes: float) -> float:
    """Mean number of nodes, of `nodes` with equal parts of the experts, that one token's choices are on."""
    per_node = moe.groups / nodes
    if moe.groups > 1 and per_node >= 1:
        missed = comb(moe.groups - int(per_node), moe.groups_chosen) / comb(moe.groups, moe.groups_chosen)
        return nodes * (1.0 - missed)
    return float(nodes * (1.0 - (1.0 - 1.0 / nodes) ** moe.top_k))


def reduce_s(hardware: Hardware, model: ModelShape, *, tp: int, tokens: float) -> float:
    """All-reduce of partial results over a tensor-parallel group in BF16."""
    if tp == 1:
        return 0.0
    plane, _ = _plane_of(hardware, tp)
    most = hardware.exchange.reduce_gb_s * 1e9 if plane.kind == "memory" else float("inf")
    rate = min(plane.bytes_per_s, most) / hardware.ranks
    num_bytes = tokens * 2 * model.hidden
    started_s = plane.latency_us * 1e-6 * (1 + (tp - 1).bit_length())
    # Small messages go to everybody at once; of large ones each reduces a part, then everybody gets all parts.
    return min(started_s + (tp - 1) * num_bytes / rate, 2 * started_s + 2.0 * (tp - 1) / tp * num_bytes / rate)


def _plane_of(hardware: Hardware, ranks: int) -> tuple[Plane, float]:
    """The limiting plane, and the share of a token's copies that cross it."""
    if ranks <= hardware.domain_ranks:
        return hardware.plane("memory"), (ranks - 1) / ranks
    return hardware.plane("transfer"), 1.0 - hardware.domain_ranks / ranks
