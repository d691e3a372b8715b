"""Prefill: which prompt tokens to compute next. Exports pure names only."""

from tripool.prefill.scheduler import PrefillScheduler

__all__ = ["PrefillScheduler"]
