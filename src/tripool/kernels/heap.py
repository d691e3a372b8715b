"""Freed memory, back to the system. glibc keeps what lies between things that are still used; loading a model leaves
much of that behind (160 to 310 MB for one of 135 M weights), and nothing that comes after needs it."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other systems do it by themselves, or never
        trim(0)
