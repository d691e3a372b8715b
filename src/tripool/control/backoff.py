"""Restart delay of a process: short the first time, longer if it keeps failing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S = 0.1
_MAX_S = 5.0
_HEALTHY_S = 10.0
"""A process that ran this long has recovered: its next failure counts as the first."""


@dataclass(slots=True)
class Backoff:
    _wait_s: float = _FIRST_S

    def failed(self, ran_s: float) -> float:
        """Seconds until the next start, after a run of `ran_s`."""
        if ran_s >= _HEALTHY_S:
            self._wait_s = _FIRST_S
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, _MAX_S)
        return wait_s
