"""Cost model: time of prefill and decode steps on described hardware. Pure: shapes in, seconds out."""

from tripool.planner.cost.setup import Balance, Footprint, Routing, Setup, StepCost, footprint, named_routing
from tripool.planner.cost.steps import DecodeModel, PrefillModel

__all__ = [
    "Balance", "DecodeModel", "Footprint", "PrefillModel", "Routing", "Setup", "StepCost", "footprint", "named_routing",
]  # fmt: skip
