"""The decode room: the running batch, and the promises on its pace. Exports pure names only."""

from tripool.decode.scheduler import DecodeScheduler
from tripool.decode.slo_controller import SloController
from tripool.decode.step_time import StepFacts, StepTime

__all__ = ["DecodeScheduler", "SloController", "StepFacts", "StepTime"]
