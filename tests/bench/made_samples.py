"""Samples as tests need them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tripool.bench import Sample


def made(index: int = 0, *, sent_s: float = 0.0, events_s: Sequence[float] = (), **fields: object) -> Sample:
    """Ends with its last event unless told otherwise."""
    known = {"input_tokens": 8, "output_tokens": len(events_s), "end_s": events_s[-1] if events_s else sent_s} | fields
    return Sample(index=index, sent_s=sent_s, events_s=array("d", events_s), **known)
