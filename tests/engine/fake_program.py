"""`tripool` with engines that need no checkpoint, for tests that start it: its processes start this program, too.

Models: `fake`, with the settings of `load_pool_engine`; `failing`, whose steps raise; `small-device`, for which the
memory does not suffice; `broken`, whose loading raises; `endless`, whose loading never ends.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import cast

from tripool.cli.main import main
from tripool.config import EngineConfig
from tripool.core import TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import DeviceOutOfMemory
from tripool.serving.worker import load_pool_engine

PROGRAM = (sys.executable, str(Path(__file__)))


class Failing(PagedFake):
    def step(self) -> list[TokenEvent]:
        raise RuntimeError("out of magic smoke")


def load(model: str, config: EngineConfig) -> PagedFake:
    if model == "failing":
        return Failing(fake_text())
    if model == "small-device":
        raise DeviceOutOfMemory("19.2 GB are needed, 3.1 are free", hint="lower --kv-gb")
    if model == "broken":
        raise RuntimeError("no such kernel")
    if model == "endless":
        threading.Event().wait()
    return cast(PagedFake, load_pool_engine(model, config, "decode"))


if __name__ == "__main__":
    main(sys.argv[1:], load, PROGRAM)
