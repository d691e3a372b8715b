"""Diagnosis and logging: the facts and findings of `doctor`, and the log."""

from tripool.observe.checks import Finding, check_machine
from tripool.observe.machine import Machine

__all__ = ["Finding", "Machine", "check_machine"]
