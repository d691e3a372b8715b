"""Errors of the planner: invalid descriptions, configs and tables, and unreachable goals."""

from __future__ import annotations

from tripool.errors import InvalidRequest


class BadDescription(InvalidRequest, code="bad_hardware"):
    """A hardware file that cannot be used; the message names the entry."""


class BadModelConfig(InvalidRequest, code="bad_model_config"):
    """A model config that cannot be planned for; the message names the entry."""


class BadRows(InvalidRequest, code="bad_rows"):
    """A table of published rows that cannot be read; the message names the line."""


class DoesNotFit(InvalidRequest, code="does_not_fit"):
    """The model needs more memory than the chips have; the message says how much is missing."""


class NotReachable(InvalidRequest, code="slo_not_reachable"):
    """No deployment reaches the goal; the message says how far away the nearest one is."""
