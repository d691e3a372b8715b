"""Is this machine fit to serve? Facts are collected in one place and judged in another; nothing here serves."""

from tripool.observe.checks import Finding, judge
from tripool.observe.machine import Machine

__all__ = ["Finding", "Machine", "judge"]
