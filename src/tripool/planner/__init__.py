"""Deployment planner: hardware and models as data, a validated cost model, and a search. Pure; needs no torch.

`probe` has side effects: it measures the machine it runs on. Simulated engines call `DecodeModel.step_s` and
`PrefillModel.step_s` for the time of a step.
"""

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, StepCost
from tripool.planner.hardware import Hardware, hardware_names, named_hardware, parse_hardware
from tripool.planner.models import ModelShape, model_names, named_model, read_config
from tripool.planner.search import Deployment, Plan, PlanGoal, make_plan

__all__ = [
    "PlanGoal", "DecodeModel", "Deployment", "Hardware", "ModelShape", "Plan", "PrefillModel", "Setup", "StepCost",
    "hardware_names", "make_plan", "model_names", "named_hardware", "named_model", "parse_hardware", "read_config",
]  # fmt: skip
