"""Parallelism of one instance: degrees that divide heads and experts, on whole nodes or an even part of one."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tripool.planner.cost import Footprint, Setup, footprint, named_routing
from tripool.planner.search.goal import PlanGoal

_TP = (1, 2, 4, 8)
_ATTENTION = (1, 2, 3, 4)
"""Ranks with attention for each rank with experts, where they are apart."""


def part_sizes(node_chips: int) -> list[int]:
    """Chips of an instance inside one node, largest first. Each divides the one before, so instances that fit into
    nodes by the sum of their chips also fit one by one.
    """
    sizes = [node_chips]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]


def instance_chips(goal: PlanGoal, ep: int) -> int:
    return ep // goal.hardware.ranks


def ep_degrees(goal: PlanGoal, most: int) -> list[int]:
    """Degrees that leave every rank equally many heads or experts. Experts are counted with and without replicas; and
    one expert per rank with copies of the shared one is what published systems use.
    """
    node = goal.hardware.node_chips
    found = _divisors(goal.model.attention.heads) if goal.model.moe is None else _expert_degrees(goal)
    ranks, parts = goal.hardware.ranks, part_sizes(node)
    whole = (ep for ep in found if ep % ranks == 0 and (ep // ranks in parts or ep // ranks % node == 0))
    return sorted(ep for ep in whole if ep <= min(most, goal.ranks))


def _expert_degrees(goal: PlanGoal) -> set[int]:
    moe = goal.model.moe
    assert moe is not None
    replicas = ceil(named_routing().redundant_share * moe.experts)
    shared = {moe.experts + 2 * replicas} if moe.shared_width else set()
    return _divisors(moe.experts) | _divisors(moe.experts + replicas) | shared


def tp_degrees(goal: PlanGoal, ep: int) -> Iterator[int]:
    """Divide the heads, and the groups of heads that share keys and values (or are divided by those)."""
    attention = goal.model.attention
    groups = getattr(attention, "kv_heads", 1) or 1
    for tp in _TP if goal.model.moe is not None else (ep,):
        fits = ep % tp == 0 and attention.heads % tp == 0 and tp <= goal.hardware.domain_ranks
        if fits and (groups % tp == 0 or tp % groups == 0):
            yield tp


def all_setups(goal: PlanGoal, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """All setups, whether their weights fit or not."""
    accept = goal.model.mtp_accept if goal.accept is None else goal.accept
    for precision in goal.precisions:
        for ep in ep_degrees(goal, most):
            for tp in tp_degrees(goal, ep):
                for num_drafts in drafts:
                    rate = accept if num_drafts else 0.0
                    setup = Setup(ep=ep, tp=tp, precision=precision, drafts=num_drafts, accept=rate)
                    yield setup, footprint(goal.hardware, goal.model, setup)


def parted_setups(goal: PlanGoal, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """Attention and experts on ranks of their own, in one fast domain; two microbatches go to and fro. The experts'
    ranks hold equally many experts, and the instance stands on whole nodes.
    """
    node, ranks, moe = goal.hardware.node_chips, goal.hardware.ranks, goal.model.moe
    if moe is None:
        return
    accept = goal.model.mtp_accept if goal.accept is None else goal.accept
    most = min(goal.ranks, goal.hardware.domain_ranks)
    sizes = sorted(held for held in _expert_degrees(goal) if held % ranks == 0 and held > 1)
    for precision in goal.precisions:
        for expert_ranks, times in ((held, times) for held in sizes for times in _ATTENTION):
            ep = expert_ranks * (1 + times)
            if ep > most or ep // ranks % node:
                continue
            for num_drafts in drafts:
                setup = Setup(
                    ep=ep, precision=precision, drafts=num_drafts, accept=accept if num_drafts else 0.0,
                    microbatches=2, expert_ranks=expert_ranks,
                )  # fmt: skip
                room = footprint(goal.hardware, goal.model, setup)
                if room.kv > 0:
                    yield setup, room


def setups(goal: PlanGoal, most: int, *, drafts: tuple[int, ...]) -> Iterator[tuple[Setup, Footprint]]:
    """Setups whose weights fit."""
    yield from ((setup, room) for setup, room in all_setups(goal, most, drafts=drafts) if room.kv > 0)


def _divisors(number: int) -> set[int]:
    return {each for each in range(1, number + 1) if number % each == 0}
