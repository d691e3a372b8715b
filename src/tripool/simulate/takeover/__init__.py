"""Takeovers in virtual time: gateways, coordinators of which one shall lead, and serving workers, as processes that
die, stop and lose each other. What serves decides: sessions, kept answers, log, lease, admission, ledger, workers."""

from tripool.simulate.takeover.run import Report, simulate_takeovers

__all__ = ["Report", "simulate_takeovers"]
