"""Mooncake's TransferEngine behind the `Transfer` protocol: real engines in two processes, over loopback TCP."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts.joining import join_line, joined
from split.serving import split_server
from tripool.errors import InvalidRequest
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.hosts.directory import DirectoryFile, OwnHost, write_directory
from tripool.hosts.errors import TransferMissing
from tripool.hosts.mooncake import MooncakeTransfer, check_mooncake
from tripool.hosts.wire import Directory, Host
from tripool.messages import KvDescriptor, WorkerId

TOKEN = "a-token-that-is-long-enough"
TOKENS, BYTES, SLOTS = 64, 70_000, 40
SENDER = """
import sys, random, json, base64
from pathlib import Path
from hosts.test_mooncake import BYTES, packed, transfer
sender = transfer(Path(sys.argv[1]), "sender", "prefill-0").sender()
lease = packed(sender, 13)
print(json.dumps(base64.b64encode(sender.descriptor(lease).payload).decode()), flush=True)
for line in sys.stdin:
    sender.memory.view(lease.slots[int(line)], 1)[:] ^= 1
    print("{}", flush=True)
"""


def has_mooncake() -> bool:
    try:
        check_mooncake(trusted=True)
    except TransferMissing:
        return False
    return True


real = pytest.mark.skipif(not has_mooncake(), reason="needs mooncake-transfer-engine-non-cuda and libibverbs1")


def transfer(folder: Path, host: str, worker: str) -> MooncakeTransfer:
    shape = {"block_tokens": TOKENS, "block_bytes": BYTES, "num_slots": SLOTS}
    folder.mkdir(exist_ok=True)
    own = OwnHost(host, TOKEN, True, "tcp://127.0.0.1:1", transfer="mooncake")
    write_directory(folder, Directory((Host("sender", "tcp://127.0.0.1:1"), Host("receiver", ""))))
    return MooncakeTransfer(own, DirectoryFile(folder), SharedMemoryTransfer(folder, WorkerId(worker, 1), **shape))


def blocks() -> list[bytes]:
    return [random.Random(n).randbytes(BYTES) for n in range(13)]


def packed(sender, num_blocks: int):  # type: ignore[no-untyped-def]
    lease = sender.lease("r", 1, 0, [None] * num_blocks, num_tokens=num_blocks * TOKENS, deadline_s=1e9)
    for block in blocks():
        sender.fill(lease, lambda view, block=block: view.__setitem__(slice(None), block))
    return lease


@contextmanager
def sending(folder: Path) -> Iterator[tuple[subprocess.Popen[str], KvDescriptor]]:
    argv = [sys.executable, "-c", SENDER, str(folder)]
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | path
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process, KvDescriptor("mooncake", base64.b64decode(json.loads(process.stdout.readline())))
        finally:
            process.stdin.close()
            process.kill()


def brought(receiver, descriptor: KvDescriptor) -> list[bytes | None]:  # type: ignore[no-untyped-def]
    kv = receiver.open(descriptor, 13 * TOKENS)
    assert kv is not None and not kv.arrived
    kv.begin()
    until_s = time.monotonic() + 60
    while not kv.arrived:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    found = [kv.read(index, memoryview(bytearray(BYTES))) for index in range(13)]
    copies = [None if block is None else bytes(block) for block in found]
    kv.close()
    assert receiver.staging.num_free == SLOTS
    return copies


@real
@pytest.mark.prove
def test_blocks_arrive_whole_or_are_refused(tmp_path: Path) -> None:
    with sending(tmp_path / "a") as (process, descriptor):
        receiver = transfer(tmp_path / "b", "receiver", "decode-0").receiver()
        for _ in range(3):
            assert brought(receiver, descriptor) == blocks()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("7\n")
        process.stdin.flush()
        process.stdout.readline()
        assert brought(receiver, descriptor) == [None] * 13, "a changed block is noticed"
        process.kill()
        process.wait()
        assert brought(receiver, descriptor) == [None] * 13, "a sender that is gone, too"
        receiver.close()


@real
@pytest.mark.prove
def test_a_server_of_two_hosts_answers_by_mooncake() -> None:
    options = ("--listen", "127.0.0.1:0", "--transfer", "mooncake", "--trusted-network")
    with split_server("fake:step_ms=1,blocks=512", decode=0, options=options) as server:
        arguments = [*join_line(server), "--role", "decode", "--trusted-network"]
        with joined(arguments):
            server.wait(lambda pools: len(pools["workers"]) == 2)
            bodies = [{"prompt": [n + 5] * 300, "max_tokens": 8, "temperature": 0} for n in range(6)]
            answers = [server.http.post("/v1/completions", json=body).json() for body in bodies]
            assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers), answers


def test_what_cannot_work_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="does not encrypt") as refused:
        check_mooncake(trusted=False)
    assert "--trusted-network" in refused.value.hint
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferMissing, match="needs Mooncake") as missing:
        check_mooncake(trusted=True)
    assert "libibverbs" in missing.value.hint and "tripool[mooncake]" in missing.value.hint
