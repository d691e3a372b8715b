"""On a GPU: the engine's process gives the tokens of a thread, types its errors, and leaves no memory behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import aclosing

import pytest
import torch

from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.backend import EngineBackend
from tripool.engine.load import load_engine
from tripool.engine.process import EngineProcess
from tripool.engine.thread import EngineThread
from tripool.engine.wire import OpenEngine
from tripool.errors import DeviceOutOfMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEADLINE_S = 60.0
COMMAND = (sys.executable, "-m", "tripool", "engine")
LEFT_BYTES = 256 * 2**20
"""What another context on the device may take meanwhile."""


def config(kv_gb: float = 0.5) -> EngineConfig:
    return EngineConfig(device="cuda", kv_gb=kv_gb, max_running=8)


async def tokens(engine: EngineBackend, number: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = tuple(5 + (number * 31 + i * 7) % 200 for i in range(40 + 60 * number))
    one = Request(id=f"r{number}", prompt_ids=prompt, params=params, seed=number)
    async with asyncio.timeout(DEADLINE_S), aclosing(engine.stream(one)) as events:
        return [event.token_id async for event in events]


async def one_by_one(engine: EngineBackend) -> list[list[int]]:
    """None beside another: so they are the same in any mode."""
    return [await tokens(engine, number) for number in range(4)]


def test_a_process_gives_the_tokens_of_a_thread_and_its_memory_back() -> None:
    thread = EngineThread(load_engine("tiny", config()))
    expected = asyncio.run(one_by_one(thread))
    assert thread.close(DEADLINE_S)
    del thread
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    for end in (EngineProcess.close, lambda engine, _: os.kill(engine.pid, signal.SIGKILL)):
        engine = EngineProcess(OpenEngine("tiny", config()), COMMAND)
        assert asyncio.run(one_by_one(engine)) == expected
        assert torch.cuda.mem_get_info()[0] < free_bytes - 0.5e9
        end(engine, DEADLINE_S)
        assert engine.close(DEADLINE_S)
        deadline_s = time.monotonic() + DEADLINE_S
        while torch.cuda.mem_get_info()[0] < free_bytes - LEFT_BYTES:
            assert time.monotonic() < deadline_s, "the process has ended, and its memory is not free"


def test_too_little_memory_is_a_typed_error_of_the_start() -> None:
    with pytest.raises(DeviceOutOfMemory) as failed:
        EngineProcess(OpenEngine("tiny", config(kv_gb=1e5)), COMMAND)
    assert failed.value.hint
