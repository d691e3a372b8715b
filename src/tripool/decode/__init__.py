"""Decode: the running batch and its TPOT objectives. Exports pure names only."""

from tripool.decode.draft_switch import DraftSwitch
from tripool.decode.scheduler import DecodeScheduler
from tripool.decode.slo_controller import SloController
from tripool.decode.step_time import StepFacts, StepTime

__all__ = ["DecodeScheduler", "DraftSwitch", "SloController", "StepFacts", "StepTime"]
