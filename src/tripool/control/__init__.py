"""Desired against actual: which processes there should be, and what happens when one is not there any more."""

from tripool.control.backoff import Backoff

__all__ = ["Backoff"]
