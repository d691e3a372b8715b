"""Simulation: a whole deployment in virtual time, drawn from a seed. It needs no engine that computes."""

from tripool.simulate.run import Report, simulate

__all__ = ["Report", "simulate"]
