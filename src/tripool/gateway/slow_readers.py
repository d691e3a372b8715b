"""How slowly a client may take a whole answer. Pure; the times are arguments.

A connection alone sees whether anything is taken at all (`gateway/connection.py`). A client that takes a little now and
then would keep what was computed for it in our memory for hours.
"""

from __future__ import annotations

SPARE_S = 30.0
BYTES_PER_S = 2**14


class SlowReaderLimit:
    """Half a minute of waiting for a client in all; every 16 KiB that it took bring a second back."""

    def __init__(self) -> None:
        self._left_s = SPARE_S

    def lasts(self, num_bytes: int, waited_s: float) -> bool:
        """After so many bytes more went out, for which we had to wait so long."""
        self._left_s = min(SPARE_S, self._left_s + num_bytes / BYTES_PER_S) - waited_s
        return self._left_s >= 0
