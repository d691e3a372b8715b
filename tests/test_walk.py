"""docs/walk.md is true: every function it names runs, in its order, for one real request over HTTP.

What it says happens beside the walk, in another thread, runs too, at no time that could be foretold.
"""

import re
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch

from tripool.config import EngineConfig, GatewayConfig
from tripool.engine.load import load_engine
from tripool.engine.thread import EngineThread
from tripool.gateway import create_app
from tripool.text import Tokenizer

WALK = Path(__file__).parent.parent / "docs" / "walk.md"


def named_functions() -> tuple[list[str], list[str]]:
    """On the walk, and beside it."""
    walk, beside = WALK.read_text().split("\n## Beside the walk\n")
    pattern = re.compile(r"`(tripool[\w.]*:[\w.]+)`")
    return pattern.findall(walk), pattern.findall(beside)


class Recorder:
    """Order of first calls of the package's functions, over all threads."""

    def __init__(self) -> None:
        self.first_calls: dict[str, None] = {}

    def __call__(self, frame, event, arg) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("tripool."):
                self.first_calls.setdefault(f"{module}:{frame.f_code.co_qualname.replace('.<locals>', '')}", None)


@pytest.fixture
def recorder():
    record = Recorder()
    threading.setprofile(record)
    sys.setprofile(record)
    yield record
    sys.setprofile(None)
    threading.setprofile(None)


def test_the_walk_is_what_happens(recorder):
    import asyncio

    torch.set_num_threads(1)
    engine = load_engine("tiny", EngineConfig(threads=1, kv_gb=0.1))
    recorder.first_calls.clear()
    thread = EngineThread(engine)
    app = create_app(thread, Tokenizer(engine.text), "tiny", GatewayConfig())
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "stream": True, "temperature": 0}

    async def ask() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
            response = await client.post("/v1/chat/completions", json=body)
            return response.text

    try:
        text = asyncio.run(ask())
    finally:
        assert thread.close(timeout_s=30)
    assert text.rstrip().endswith("[DONE]")
    walked, beside = named_functions()
    assert len(walked) >= 20
    assert beside
    happened = list(recorder.first_calls)
    missing = [name for name in walked + beside if name not in recorder.first_calls]
    assert not missing, f"named in the walk but never called: {missing}"
    assert [name for name in happened if name in walked] == walked
