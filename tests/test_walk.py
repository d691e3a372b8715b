"""docs/walk.md is true: every function it names runs, in its order, for one real request over HTTP.

What happens beside the walk, in another thread or process, runs too, at a time that the page does not promise. The page
names the first call into each room, so that a reader who follows it meets every room that a request meets.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import tripool
from tenants.serving import bearer, make_keys
from tripool.config import EngineConfig, GatewayConfig
from tripool.control.run_manifest import RunManifest, ServedModel
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.fabric.folder import coordinator_address
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.gateway.server import listen, url_of
from tripool.messages import Drain, WorkerId
from tripool.serving import AccessConfig, build_colocated
from tripool.serving.access import gateway_access
from tripool.serving.coordinator import CoordinatorProcess
from tripool.serving.gateway import GatewayProcess
from tripool.serving.worker import WorkerProcess

WALK = Path(__file__).parent.parent / "docs" / "walk.md"
ROOT = Path(tripool.__file__).parent
DEADLINE_S = 60.0
HEADERS = ("Assembly", "In", "Beside the walk", "Split: ", "Beside the split walk")


def named_functions() -> list[list[str]]:
    """Those of the assembly, on the walk, beside it; on the split walk, beside that."""
    text = WALK.read_text()
    starts = [text.index(f"\n## {header}") for header in HEADERS]
    parts = [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [re.findall(r"`(tripool[\w.]*:[\w.]+)`", part) for part in parts]


class Recorder:
    """Order of first calls of the package's functions, over all threads."""

    def __init__(self) -> None:
        self.first_calls: dict[str, None] = {}

    def __call__(self, frame, event, arg) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("tripool."):
                self.first_calls.setdefault(f"{module}:{frame.f_code.co_qualname.replace('.<locals>', '')}", None)

    def take(self) -> list[str]:
        """What was called since this was last asked."""
        taken, self.first_calls = list(self.first_calls), {}
        return taken


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    record = Recorder()
    threading.setprofile(record)
    sys.setprofile(record)
    yield record
    sys.setprofile(None)
    threading.setprofile(None)


def check(calls: list[str], walked: list[str], beside: Iterable[str] = ()) -> None:
    missing = [name for name in [*walked, *beside] if name not in calls]
    assert not missing, f"named in the walk but never called: {missing}"
    assert [name for name in calls if name in walked] == walked


def is_plain(name: str) -> bool:
    """A function or method that a reader finds by its name: not a property, a lambda, or what Python generates."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = vars(found).get(part)  # not getattr, which would call a property's function
        if found is None:
            return False
    return callable(found) or isinstance(found, (classmethod, staticmethod))


def first_by_room(calls: Iterable[str]) -> list[str]:
    """The first call into each folder of the package, in order."""
    rooms: dict[str, str] = {}
    for name in calls:
        room = name.partition(":")[0].split(".")[1]
        if room not in rooms and (ROOT / room).is_dir() and is_plain(name):
            rooms[room] = name
    return list(rooms.values())


def test_the_first_call_into_each_room_is_found() -> None:
    calls = [
        "tripool.core:Request.stop_ids",
        "tripool.engine.backend:EngineBackend.alive",
        "tripool.cache.records:__create_fn__.__init__",
        "tripool.engine.backend:EngineBackend.stream",
        "tripool.engine.paged:Paged.add",
        "tripool.cache.blocks:BlockPool.match",
    ]
    assert first_by_room(calls) == [calls[3], calls[5]], "modules beside rooms, properties, generated code are none"


CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "stream": True, "temperature": 0}


def test_the_walk_is_what_happens(recorder: Recorder, tmp_path: Path) -> None:
    assembly, walked, beside, _, _ = named_functions()
    keys = tmp_path / "keys"
    key = make_keys(keys, "alice")["alice"]
    recorder.take()
    options = (EngineConfig(threads=1, kv_gb=0.1), GatewayConfig(port=0))
    with build_colocated(["tiny"], *options, access=AccessConfig(keys)) as server:
        url = server.url
        with server.running():
            assembled = recorder.take()
            answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=bearer(key), timeout=DEADLINE_S)
            deadline_s = time.monotonic() + DEADLINE_S
            while walked[-1] not in recorder.first_calls:  # the client has its answer before the server is done with it
                assert time.monotonic() < deadline_s, f"never called: {walked[-1]}"
                time.sleep(0.01)
        calls = recorder.take()
    assert answer.text.rstrip().endswith("[DONE]")
    check(assembled, assembly)
    check(calls, walked, beside)
    met = first_by_room(calls[: calls.index(walked[-1])])  # what follows is the end of the server
    left_out = [name for name in met if name not in walked]
    assert not left_out, f"the walk leaves out the first call into a room: {left_out}"
    assert len(met) >= 9, "a request meets fewer rooms than it did: is the recorder blind?"


MEMBER = """
import sys
from pathlib import Path
from tripool.cache.member import run_member
from tripool.config import CacheConfig
from tripool.messages import WorkerId
run_member(Path(sys.argv[1]), WorkerId("cache-0", 1), CacheConfig(slot_bytes=int(sys.argv[2]), num_slots=64))
"""


@contextmanager
def cache_member(folder: Path, block_bytes: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", MEMBER, str(folder), str(block_bytes)]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def split_in_threads(folder: Path, keys: Path) -> Iterator[str]:
    """What the processes of a split server run, in threads, so that their calls are recorded; yields the URL."""
    RunManifest((ServedModel("fake", fake_text(), ("cache-0",)),)).write(folder)
    engines = {role: PagedFake(fake_text(), num_blocks=64) for role in ("prefill", "decode")}
    supervisor, inherited = SupervisorChannel.pair()
    with ExitStack() as stack:
        stack.callback(supervisor.close)
        stack.enter_context(cache_member(folder, engines["prefill"].block_bytes))
        listener = stack.enter_context(listen("127.0.0.1", 0))
        owner, owned = SupervisorChannel.pair()
        stack.callback(owner.close)
        coordinator = CoordinatorProcess(folder, WorkerId("coordinator", 1), SupervisorChannel(owned))
        deciding = threading.Thread(target=coordinator.run)
        deciding.start()
        stack.callback(deciding.join, DEADLINE_S)
        stack.callback(owner.send, Drain())
        gateway = GatewayProcess(
            folder, WorkerId("gateway", 1), SupervisorChannel(inherited), gateway_access(folder, keys)
        )
        thread = threading.Thread(target=gateway.run, args=(listener,))
        thread.start()
        stack.callback(thread.join, DEADLINE_S)
        stack.callback(supervisor.send, Drain())
        for role, engine in engines.items():
            worker = WorkerProcess(engine, role, WorkerId(f"{role}-0", 1), coordinator_address(folder))
            stack.enter_context(worker)
            running = threading.Thread(target=worker.run)
            running.start()
            stack.callback(running.join, DEADLINE_S)
            stack.callback(worker.stop)
        yield url_of(listener)


def test_the_split_walk_is_what_happens(recorder: Recorder, tmp_path: Path) -> None:
    *_, walked, beside = named_functions()
    keys = make_keys(tmp_path / "keys", "admin")
    with (
        split_in_threads(tmp_path, tmp_path / "keys") as url,
        httpx.Client(base_url=url, headers=bearer(keys["admin"]), timeout=DEADLINE_S) as client,
    ):
        deadline_s = time.monotonic() + DEADLINE_S

        def until(done) -> None:
            while not done():
                assert time.monotonic() < deadline_s, [name for name in beside if name not in recorder.first_calls]

        def ready() -> bool:
            pools = client.get("/v1/pools").json()
            return len(pools["workers"]) == 2 and not any(member["away"] for member in pools["cache"])

        until(ready)
        recorder.take()
        long = {"messages": [{"role": "user", "content": "Hello! " * 40}], "max_tokens": 80, "stream": True}
        text = client.post("/v1/chat/completions", json=long).text
        until(lambda: all(name in recorder.first_calls for name in beside))  # some of it comes after the answer
        calls = recorder.take()
    assert text.rstrip().endswith("[DONE]")
    check(calls, walked, beside)
