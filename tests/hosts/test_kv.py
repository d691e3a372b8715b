"""KV between hosts: what arrives is what was sent, or it is known not to be; and no memory is lost on the way."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts.in_process import Running, fetcher, host_server
from tripool.fabric.kv_transfer import IncomingKv, KvSender, Lease
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.hosts.directory import DirectoryFile, OwnHost, write_directory
from tripool.hosts.kv import HostReceiver, HostTransfer
from tripool.hosts.wire import Directory, Host
from tripool.messages import KvDescriptor, WorkerId

TOKENS, BYTES, SLOTS = 64, 70_000, 40
DEADLINE_S = 30.0


def transfer(folder: Path, own: OwnHost, name: str) -> HostTransfer:
    shape = {"block_tokens": TOKENS, "block_bytes": BYTES, "num_slots": SLOTS}
    return HostTransfer(own, DirectoryFile(folder), SharedMemoryTransfer(folder, WorkerId(name, 1), **shape))


@pytest.fixture(params=[False, True], ids=["encrypted", "trusted"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    with host_server(tmp_path / "a", trusted=request.param, address="0.0.0.0") as running:
        yield running


@pytest.fixture
def sender(server: Running) -> Iterator[KvSender]:
    found = transfer(server.folder, server.own, "prefill-0").sender()
    yield found
    found.close()


@pytest.fixture
def receiver(server: Running, tmp_path: Path) -> Iterator[HostReceiver]:
    own = server.known_to(tmp_path / "b")
    found = transfer(tmp_path / "b", own, "decode-0").receiver()
    assert isinstance(found, HostReceiver)
    with fetcher(tmp_path / "b", own):
        yield found
    found.close()


def packed(sender: KvSender, num_blocks: int, seed: int) -> tuple[Lease, list[bytes]]:
    blocks = [random.Random(100 * seed + n).randbytes(BYTES) for n in range(num_blocks)]
    lease = sender.lease("r", 1, 0, [None] * num_blocks, num_tokens=num_blocks * TOKENS, deadline_s=1e9)
    assert lease is not None
    for block in blocks:
        sender.fill(lease, lambda view, block=block: view.__setitem__(slice(None), block))
    return lease, blocks


def arrive(kv: IncomingKv | None) -> IncomingKv:
    assert kv is not None
    until_s = time.monotonic() + DEADLINE_S
    while not kv.arrived:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return kv


def read_all(kv: IncomingKv) -> list[bytes | None]:
    buffers = [bytearray(BYTES) for _ in range(kv.num_blocks)]
    blocks = [kv.read(index, memoryview(buffer)) for index, buffer in enumerate(buffers)]
    return [None if block is None else bytes(block) for block in blocks]


def test_blocks_of_many_sequences_arrive_whole(sender: KvSender, receiver: HostReceiver) -> None:
    """More than there is room for at once: the rest waits its turn."""
    sent = [packed(sender, count, seed) for seed, count in enumerate((1, 13, 3, 20))]
    opened = [receiver.open(sender.descriptor(lease), lease.num_tokens) for lease, _ in sent] * 2
    for kv in opened[4:]:
        assert kv is not None
    again = [receiver.open(sender.descriptor(lease), lease.num_tokens) for lease, _ in sent]
    for kv in (*opened[:4], *again):
        assert kv is not None and not kv.arrived
        kv.begin()
    for kv, (_, blocks) in zip((*opened[:4], *again), (*sent, *sent), strict=True):
        assert read_all(arrive(kv)) == blocks
        kv.close()
    assert receiver.staging.num_free == SLOTS


def test_on_one_host_blocks_are_mapped(server: Running, sender: KvSender) -> None:
    lease, blocks = packed(sender, 3, 1)
    local = transfer(server.folder, server.own, "decode-1").receiver()
    kv = local.open(sender.descriptor(lease), lease.num_tokens)
    assert kv is not None and kv.arrived, "in place"
    assert read_all(kv) == blocks


def test_a_slot_that_was_leased_again_is_noticed(sender: KvSender, receiver: HostReceiver) -> None:
    lease, blocks = packed(sender, 2, 1)
    kv = receiver.open(sender.descriptor(lease), lease.num_tokens)
    sender.memory.view(lease.slots[1], 1)[:] = blocks[1][0] ^ 1
    assert kv is not None
    kv.begin()
    assert read_all(arrive(kv)) == [None, None], "all of it is refused"
    kv.close()
    assert receiver.staging.num_free == SLOTS


def test_kv_of_a_sender_that_is_gone_is_known_to_be(sender: KvSender, receiver: HostReceiver) -> None:
    lease, _ = packed(sender, 2, 1)
    descriptor = sender.descriptor(lease)
    sender.memory.path.rename(sender.memory.path.with_suffix(".gone"))  # type: ignore[attr-defined]
    kv = receiver.open(descriptor, lease.num_tokens)
    assert kv is not None
    kv.begin()
    assert read_all(arrive(kv)) == [None, None]
    kv.close()
    assert receiver.staging.num_free == SLOTS
    sender.memory.path.with_suffix(".gone").rename(sender.memory.path)  # type: ignore[attr-defined]


def test_closing_at_any_time_gives_the_memory_back(sender: KvSender, receiver: HostReceiver) -> None:
    leases = [packed(sender, 9, seed)[0] for seed in range(4)]
    for lease in leases * 3:
        kv = receiver.open(sender.descriptor(lease), lease.num_tokens)
        assert kv is not None
        kv.begin()
        kv.close()
    until_s = time.monotonic() + DEADLINE_S
    while receiver.staging.num_free < SLOTS:
        assert time.monotonic() < until_s
        time.sleep(0.001)
        receiver.hear()


def test_descriptors_of_others_are_refused(sender: KvSender, receiver: HostReceiver) -> None:
    lease, _ = packed(sender, 2, 1)
    descriptor = sender.descriptor(lease)
    assert receiver.open(descriptor, 3 * TOKENS) is None, "not the KV of so many tokens"
    assert receiver.open(KvDescriptor("other", descriptor.payload), 2 * TOKENS) is None
    rng = random.Random(3)
    for _ in range(200):
        payload = bytearray(descriptor.payload)
        payload[rng.randrange(len(payload))] = rng.randrange(256)
        kv = receiver.open(KvDescriptor("hosts", bytes(payload)), 2 * TOKENS)
        if kv is not None:
            kv.close()
    assert receiver.staging.num_free == SLOTS


def test_parts_go_over_all_links_and_around_those_that_fail(sender: KvSender, server: Running, tmp_path: Path) -> None:
    """Of four addresses one is the host, one is it again, one is another host, and at one nothing listens."""
    port = server.address.rpartition(":")[2]
    own = OwnHost("other", server.own.token, server.own.trusted)
    folder = tmp_path / "c"
    folder.mkdir()
    with host_server(tmp_path / "d", trusted=server.own.trusted, name="another") as another:
        free = socket.create_server(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        links = (nobody, another.address, f"tcp://127.0.0.2:{port}")
        write_directory(folder, Directory((Host(server.own.name, server.address, {}, (), links), own.host)))
        found = transfer(folder, own, "decode-0").receiver()
        with fetcher(folder, own):
            for seed in range(3):
                lease, blocks = packed(sender, 13, seed)
                kv = found.open(sender.descriptor(lease), lease.num_tokens)
                assert kv is not None
                kv.begin()
                assert read_all(arrive(kv)) == blocks
                kv.close()
                sender.release(lease.number)
        found.close()


def test_without_the_own_host_server_kv_fails_and_is_tried_again_later(
    sender: KvSender, server: Running, tmp_path: Path
) -> None:
    lease, blocks = packed(sender, 5, 1)
    own = server.known_to(tmp_path / "b")
    found = transfer(tmp_path / "b", own, "decode-0").receiver()
    assert isinstance(found, HostReceiver)

    def brought() -> list[bytes | None]:
        kv = found.open(sender.descriptor(lease), lease.num_tokens)
        assert kv is not None
        kv.begin()
        blocks = read_all(arrive(kv))
        kv.close()
        assert found.staging.num_free == SLOTS
        return blocks

    assert brought() == [None] * 5, "nobody to ask"
    for _ in range(2):
        with fetcher(tmp_path / "b", own):
            assert brought() == blocks
    found.close()
