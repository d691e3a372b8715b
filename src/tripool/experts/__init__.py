"""Expert parallelism, its decisions: which rank holds which expert, balanced by load, moved and repaired step by step.

Arrays and bytes only: no clock, socket, thread or tensor. The ranks and their exchange use these objects.
"""

from tripool.experts.balance import balance, least_imbalance
from tripool.experts.expert_map import ExpertMap
from tripool.experts.load_window import LoadWindow
from tripool.experts.moves import Copy, MoveStep, plan_moves
from tripool.experts.placement import imbalance, rank_loads

__all__ = [
    "Copy",
    "ExpertMap",
    "LoadWindow",
    "MoveStep",
    "balance",
    "imbalance",
    "least_imbalance",
    "plan_moves",
    "rank_loads",
]
