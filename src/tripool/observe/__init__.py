"""Is this machine fit to serve, and what happened while it did: doctor's facts and findings, and the log."""

from tripool.observe.checks import Finding, check_machine
from tripool.observe.machine import Machine

__all__ = ["Finding", "Machine", "check_machine"]
