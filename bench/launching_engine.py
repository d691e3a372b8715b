"""`tripool` over an engine that launches kernels as a GPU's does, without one: the server of `engine_process.py`.

    python bench/launching_engine.py LAUNCHES LAUNCH_US STEP_MS thread|process [tripool arguments]

A step holds the interpreter's lock for LAUNCH_US, gives it up as a launch does, LAUNCHES times; then it waits for its
device, without the lock, until STEP_MS after the last step. `process`: the engine has a process of its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from instant_engine import InstantEngine, _Running
from tripool.cli.main import main
from tripool.config import EngineConfig, GatewayConfig
from tripool.core import FinishReason, TokenEvent
from tripool.engine.fake import fake_text
from tripool.serving import build_colocated


class LaunchingEngine(InstantEngine):
    def __init__(self, num_launches: int, launch_s: float, step_s: float) -> None:
        super().__init__(fake_text(), context_tokens=10**6, max_running=4096)
        self._num_launches, self._launch_s, self._step_s = num_launches, launch_s, step_s
        self._due_s = 0.0
        """When the device ends its step: it begins the next one at once, or when that is launched."""
        self._nowhere = os.open(os.devnull, os.O_WRONLY)

    def step(self) -> list[TokenEvent]:
        for _ in range(self._num_launches):
            launched_s = time.perf_counter() + self._launch_s
            while time.perf_counter() < launched_s:
                pass
            os.write(self._nowhere, b"x")  # a system call of a microsecond, without the lock
        events = super().step()
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        self._due_s = max(self._due_s, time.perf_counter()) + self._step_s
        return events

    def _advance(self, running: _Running, choice: int) -> TokenEvent:
        """Any token: to choose one by hashes, as the fake engine does, would take as long as what is measured."""
        request, index = running.request, running.num_tokens[choice]
        running.num_tokens[choice] += 1
        finish: FinishReason | None = None
        if index + 1 == request.params.max_tokens:
            finish = "length"
            del running.num_tokens[choice]
        return TokenEvent(request.id, choice, index, 260 + index % 58, finish)


def serve(*arguments: str) -> None:
    num_launches, launch_us, step_ms, mode, *more = arguments

    def load(model: str, config: EngineConfig) -> LaunchingEngine:
        return LaunchingEngine(int(num_launches), float(launch_us) / 1e6, float(step_ms) / 1e3)

    program = (sys.executable, str(Path(__file__).resolve()), num_launches, launch_us, step_ms, "process")
    if more:
        main(more, load, program)
        return
    command = (*program, "engine", "--log-level", "warning") if mode == "process" else None
    with build_colocated(["fake"], gateway=GatewayConfig(port=0), load=load, engine_command=command) as server:
        server.run(lambda: print(f"at {server.url}/v1", flush=True))


if __name__ == "__main__":
    serve(*sys.argv[1:])
