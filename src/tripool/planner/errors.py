"""Errors of the planner: invalid descriptions, configs and tables, and unreachable goals."""

from __future__ import annotations

from tripool.errors import InvalidRequest


class BadDescription(InvalidRequest):
    """A hardware file that cannot be used; the message names the entry."""

    code = "bad_hardware"


class BadModelConfig(InvalidRequest):
    """A model config that cannot be planned for; the message names the entry."""

    code = "bad_model_config"


class BadRows(InvalidRequest):
    """A table of published rows that cannot be read; the message names the line."""

    code = "bad_rows"


class DoesNotFit(InvalidRequest):
    """The model needs more memory than the chips have; the message says how much is missing."""

    code = "does_not_fit"


class NotReachable(InvalidRequest):
    """No deployment reaches the goal; the message says how far away the nearest one is."""

    code = "slo_not_reachable"
