"""docs/walk.md is true: every function it names runs, in its order, for one real request over HTTP.

What it says happens beside the walk, in another thread or process, runs too, at no time that could be foretold.
"""

import asyncio
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI

from tripool.cache.client import PoolClient
from tripool.cache.host import LocalHost
from tripool.config import EngineConfig, GatewayConfig, RouterConfig
from tripool.decode.worker import DecodeWorker
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine.load import load_engine
from tripool.engine.thread import EngineThread
from tripool.fabric import KvReceiver, KvSender, Link, Loop
from tripool.fabric.arena import Arena, FileMaps
from tripool.fabric.channel import ZmqTransport
from tripool.fabric.prefixes import Prefixes
from tripool.gateway import create_app
from tripool.gateway.pools import Pools
from tripool.messages import PROTOCOL, Hello, WorkerId
from tripool.prefill.worker import PrefillWorker
from tripool.text import Tokenizer

WALK = Path(__file__).parent.parent / "docs" / "walk.md"
DEADLINE_S = 60.0


def named_functions() -> tuple[list[str], list[str], list[str], list[str]]:
    """On the walk, beside it; on the split walk, beside that."""
    pattern = re.compile(r"`(tripool[\w.]*:[\w.]+)`")
    text = WALK.read_text()
    headers = ("\n## Beside the walk\n", "\n## Split: ", "\n## Beside the split walk\n")
    ends = [0, *(text.index(header) for header in headers), len(text)]
    walk, beside, split, beside_split = (pattern.findall(text[start:stop]) for start, stop in pairwise(ends))
    return walk, beside, split, beside_split


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


def ask(app: FastAPI, prompt: str, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True}

    async def post() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
            response = await client.post("/v1/chat/completions", json={**body, "temperature": 0})
            return response.text

    return asyncio.run(post())


def check(recorder: Recorder, walked: list[str], beside: list[str]) -> None:
    happened = list(recorder.first_calls)
    missing = [name for name in walked + beside if name not in recorder.first_calls]
    assert not missing, f"named in the walk but never called: {missing}"
    assert [name for name in happened if name in walked] == walked


def test_the_walk_is_what_happens(recorder):
    torch.set_num_threads(1)
    engine = load_engine("tiny", EngineConfig(threads=1, kv_gb=0.1))
    recorder.first_calls.clear()
    thread = EngineThread(engine)
    app = create_app(thread, Tokenizer(engine.text), "tiny", GatewayConfig())
    try:
        text = ask(app, "Hello!", 4)
    finally:
        assert thread.close(timeout_s=30)
    assert text.rstrip().endswith("[DONE]")
    walked, beside, _, _ = named_functions()
    assert len(walked) >= 20
    assert beside
    check(recorder, walked, beside)


MEMBER = """
import sys
from pathlib import Path
from tripool.cache.member import run_member
from tripool.config import CacheConfig
from tripool.messages import WorkerId
run_member(Path(sys.argv[1]), WorkerId("cache-0", 1), CacheConfig(slot_bytes=int(sys.argv[2]), num_slots=64))
"""


class Workers:
    """A prefill and a decode worker in threads, so that their calls are recorded; a cache member of its own."""

    def __init__(self, folder: Path, address: str) -> None:
        engines = [PagedFake(fake_text(), num_blocks=64) for _ in range(2)]
        command = [sys.executable, "-c", MEMBER, str(folder), str(engines[0].block_bytes)]
        self._member = subprocess.Popen(command)
        self._pools, self._links, self._loops, self._closing = [], [], [], []
        for role, engine in zip(("prefill", "decode"), engines, strict=True):
            worker_id = WorkerId(f"{role}-0", 1)
            limits = (engine.num_blocks * 64, engine.max_running, engine.context_tokens, engine.vocab)
            link = Link(ZmqTransport(address), Hello(PROTOCOL, role, worker_id, 1, engine.name, *limits))
            pool = PoolClient(LocalHost(folder), ["cache-0"], worker_id)
            prefixes = Prefixes(engine, pool)
            if role == "prefill":
                sender = KvSender(Arena(folder / "parcels", engine.block_bytes, 64))
                worker = PrefillWorker(engine, worker_id, sender, link.send, prefixes=prefixes)
                self._closing.append(sender)
            else:
                receiver = KvReceiver(FileMaps(folder))
                worker = DecodeWorker(engine, worker_id, receiver, link.send, prefixes=prefixes)
                self._closing.append(receiver)
            self._closing += [pool, link]
            self._pools.append(pool)
            self._links.append(link)
            self._loops.append(Loop(link, worker, worker_id))
        self._threads = [threading.Thread(target=loop.run) for loop in self._loops]

    def start(self) -> None:
        for pool in self._pools:
            assert pool.wait(DEADLINE_S) == []
        for thread in self._threads:
            thread.start()

    @property
    def welcome(self) -> bool:
        return all(link.welcome for link in self._links)

    def stop(self) -> None:
        for loop in self._loops:
            loop.stop()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for one in self._closing:
            one.close()
        self._member.kill()
        self._member.wait(DEADLINE_S)


def test_the_split_walk_is_what_happens(recorder, tmp_path):
    address = f"ipc://{tmp_path}/g"
    workers = Workers(tmp_path, address)
    pools = Pools(RouterConfig(), addresses=[address], epoch=1, suspect=lambda message: None)
    app = create_app(pools, Tokenizer(fake_text()), "fake", GatewayConfig())
    walked, beside = named_functions()[2:]
    text = ""

    async def walk() -> None:
        nonlocal text
        pools.start()
        workers.start()
        async with asyncio.timeout(DEADLINE_S):
            while not workers.welcome or len(pools.describe()["workers"]) < 2:
                await asyncio.sleep(0.01)
            recorder.first_calls.clear()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
                body = {"messages": [{"role": "user", "content": "Hello! " * 40}], "max_tokens": 80, "stream": True}
                text = (await client.post("/v1/chat/completions", json=body)).text
            while not all(name in recorder.first_calls for name in beside):  # the answer is over before the rest is
                await asyncio.sleep(0.01)

    try:
        asyncio.run(walk())
    finally:
        workers.stop()
        pools.close()
    assert text.rstrip().endswith("[DONE]")
    assert len(walked) >= 15
    check(recorder, walked, beside)
