"""Process control: which processes should run, and what happens when one ends."""

from tripool.control.backoff import Backoff

__all__ = ["Backoff"]
