"""Cost model: time of prefill and decode steps on described hardware. Pure: shapes in, seconds out."""

from tripool.planner.cost.decode import DecodeModel
from tripool.planner.cost.prefill import PrefillModel
from tripool.planner.cost.setup import Balance, Footprint, Routing, Setup, StepCost, footprint, named_routing

__all__ = [
    "Balance", "DecodeModel", "Footprint", "PrefillModel", "Routing", "Setup", "StepCost", "footprint", "named_routing",
]  # fmt: skip
