"""A rank's part in long prompts that the ranks of its instance compute together.

`kernels/native/prompt.h` runs inside a step, and in a thread that helps other ranks while this one is idle; this module
only starts and ends it.
"""

from __future__ import annotations

import sys
from ctypes import addressof

from tripool.errors import ExchangeError
from tripool.experts.layout import Memory
from tripool.experts.prompt_layout import PromptLayout
from tripool.kernels.cpu8 import library
from tripool.kernels.cpu8.table import Stack8

_OFFSETS = ("owners", "owner_bytes", "tokens", "prior", "areas", "area_bytes", "stream", "queries", "kv", "attended")
_SIZES = ("rows", "context", "hidden", "query_width", "kv_width", "attended_width")


class NativePrompts:
    """From its creation to `close` this rank helps others, and others help its steps."""

    def __init__(self, layout: PromptLayout, memory: Memory, rank: int, stack: Stack8) -> None:
        if layout.hidden != stack.struct.norm.width:
            raise ExchangeError("the memory was made for another model", hint="start all ranks with one model")
        offsets = (getattr(layout, name) for name in _OFFSETS)
        sizes = (getattr(layout, name) for name in _SIZES)
        struct = library.PromptMemory(memory.ctypes.data, *offsets, layout.ranks, rank, *sizes, stack.at)
        self._library, self._stack, self._memory = library.library(), stack, memory
        self._at = self._library.tripool_prompts_open(addressof(struct)) if sys.platform == "linux" else None
        if not self._at:
            raise ExchangeError("the helping thread cannot be started", hint="ranks need Linux and a thread each")
        stack.struct.prompts = self._at

    def close(self) -> None:
        """No step may be running."""
        self._stack.struct.prompts = None
        at, self._at = self._at, None
        if at:
            self._library.tripool_prompts_close(at)
