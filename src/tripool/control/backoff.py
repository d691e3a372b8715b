"""How long to wait before a process is started again: at once the first time, longer if it keeps falling. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S = 0.1
_MAX_S = 5.0
_HEALTHY_S = 10.0
"""Who has run for so long has recovered: its next fall is a first one."""


@dataclass(slots=True)
class Backoff:
    _wait_s: float = _FIRST_S

    def fell(self, ran_s: float) -> float:
        """After a run of `ran_s`: seconds until the next one may begin."""
        if ran_s >= _HEALTHY_S:
            self._wait_s = _FIRST_S
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, _MAX_S)
        return wait_s
