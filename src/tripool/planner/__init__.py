"""The planner: hardware and models as data, a cost model with its errors beside it, and a search. Pure; needs no torch.

`probe` is the worldly half: it measures the machine it runs on. Simulated engines ask `DecodeModel.step_s` and
`PrefillModel.step_s` for the time of a step.
"""

from tripool.planner.cost import DecodeModel, PrefillModel, Setup, Step
from tripool.planner.hardware import Hardware, hardware_names, named_hardware, parse_hardware
from tripool.planner.models import ModelShape, model_names, named_model, read_config
from tripool.planner.search import Ask, Deployment, Plan, make_plan

__all__ = [
    "Ask", "DecodeModel", "Deployment", "Hardware", "ModelShape", "Plan", "PrefillModel", "Setup", "Step",
    "hardware_names", "make_plan", "model_names", "named_hardware", "named_model", "parse_hardware", "read_config",
]  # fmt: skip
