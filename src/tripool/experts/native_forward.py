"""The compiled forwarder of requests and answers between hosts; `experts/forward.py` is the plain one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from tripool.errors import ExchangeError
from tripool.experts.layout import Layout, Memory
from tripool.experts.memory import exchange_memory

FILE = Path(__file__).parent / "native" / "_forward.so"
_HEADS = 8
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "open": ((_POINTER, _POINTER, _POINTER), _POINTER),
    "close": ((_POINTER,), None),
    "restart": ((_POINTER,), None),
    "room": ((_POINTER,), _INT64),
    "take": ((_POINTER, _POINTER, _INT64, _INT64), _INT64),
    "put": ((_POINTER, _POINTER, _INT64), ctypes.c_int),
}


@cache
def _library() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(FILE))
    except OSError as error:
        hint = "install a C compiler and then the package again"
        raise ExchangeError("ranks over several hosts need compiled code", hint=hint) from error
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(loaded, f"tripool_forward_{name}")
        function.argtypes, function.restype = arguments, result
    return loaded


class NativeForwarder:
    """`take` and `restart` are for one thread, `put` for one thread at a time."""

    def __init__(self, layout: Layout, memory: Memory, here: Sequence[bool], there: Sequence[bool]) -> None:
        self._which = np.array(here, np.uint8), np.array(there, np.uint8)
        self._memory, self._library = memory, _library()
        struct = exchange_memory(layout, memory)
        pointers = (which.ctypes.data for which in self._which)
        self._at = self._library.tripool_forward_open(ctypes.addressof(struct), *pointers)
        if not self._at:
            raise ExchangeError("nothing can be forwarded", hint="ranks need Linux")
        self.max_bytes: int = 2 * self._library.tripool_forward_room(self._at)
        """Of one `take`."""
        self._taken = np.empty(_HEADS + self.max_bytes, np.uint8)

    def take(self, wait_s: float = 0.0, head_bytes: int = 0) -> memoryview:
        """Records, once there are some; none after `wait_s`. Valid until the next call. `head_bytes`: left free before
        them, at most 8."""
        assert head_bytes <= _HEADS
        to = self._taken.ctypes.data + _HEADS
        size = self._library.tripool_forward_take(self._at, to, self.max_bytes, int(wait_s * 1e9))
        return self._taken.data[_HEADS - head_bytes : _HEADS + size]

    def put(self, data: memoryview | bytes) -> bool:
        array = np.frombuffer(data, np.uint8)
        return not self._library.tripool_forward_put(self._at, array.ctypes.data, len(array))

    def restart(self) -> None:
        self._library.tripool_forward_restart(self._at)

    def close(self) -> None:
        at, self._at = self._at, None
        if at:
            self._library.tripool_forward_close(at)
