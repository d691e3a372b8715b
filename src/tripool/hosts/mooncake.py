"""KV transfer between hosts by Mooncake's TransferEngine (an extra), behind the same protocols as our own.

The sender's arena is registered with its engine, and the descriptor says where in the sender's process a block is; the
receiver's engine reads it into registered memory of its own, and every block is checked there. Mooncake neither
authenticates nor encrypts, so the network has to be declared trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec

from tripool.cache.arena import Arena
from tripool.cache.copying import checksum
from tripool.errors import InvalidRequest
from tripool.fabric.kv_transfer import KvReceiver, KvSender, TransferCapabilities
from tripool.fabric.shared_memory import SharedMemoryTransfer
from tripool.hosts.connection import parse_address
from tripool.hosts.directory import DirectoryFile, OwnHost
from tripool.hosts.errors import TransferMissing
from tripool.hosts.join import address_towards
from tripool.hosts.kv import Describe, HostBlocks, HostReceiver, RemoteKv, table_of
from tripool.messages import KvDescriptor, Natural, Positive

KIND = "mooncake"
_METADATA, _PROTOCOL = "P2PHANDSHAKE", "tcp"
"""No metadata server: engines tell each other where their memory is."""
_THREADS = 2


def check_mooncake(*, trusted: bool) -> None:
    """Raises what makes this transfer impossible here, with the remedy."""
    if not trusted:
        hint = "add --trusted-network, on all hosts; or leave out --transfer: our own transfer encrypts"
        raise InvalidRequest("Mooncake does not encrypt KV between hosts", hint=hint, param="transfer")
    _engine_class()


def _engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        hint = (
            "pip install 'tripool[mooncake]', and the system's libibverbs (Debian: libibverbs1 and librdmacm1); or "
            f"leave out --transfer ({error})"
        )
        raise TransferMissing("--transfer mooncake needs Mooncake's transfer engine", hint=hint) from error
    return TransferEngine


class MooncakeBlocks(HostBlocks, frozen=True, array_like=True):
    """What a descriptor of this kind holds."""

    session: Annotated[str, msgspec.Meta(max_length=300)]
    """The sender's engine."""
    start: Natural
    """Address of the first slot in the sender's process, and bytes from slot to slot."""
    stride: Positive


class _Engine:
    """The TransferEngine of this process."""

    def __init__(self, own: OwnHost) -> None:
        first = next(filter(None, (own.address, *own.links)), "")
        self.host = parse_address(first)[0] if first else address_towards(own.join)
        self._engine = _engine_class()()
        if self._engine.initialize(self.host, _METADATA, _PROTOCOL, ""):
            hint = "the lines of its log before this one say why"
            raise TransferMissing(f"Mooncake's transfer engine does not start at {self.host}", hint=hint)

    @property
    def session(self) -> str:
        return f"{self.host}:{self._engine.get_rpc_port()}"

    def register(self, arena: Arena) -> None:
        start, num_bytes = slots_of(arena)[0], slots_of(arena)[1] * arena.num_slots
        if self._engine.register_memory(start, num_bytes):
            raise TransferMissing("Mooncake does not take the memory for KV", hint="its log says why")

    def read(self, session: str, into: list[int], source: list[int], num_bytes: int) -> bool:
        """Waits until all of it is there, or the engine gives up."""
        done: int = self._engine.batch_transfer_sync_read(session, into, source, [num_bytes] * len(into))
        return done == 0


def slots_of(arena: Arena) -> tuple[int, int]:
    """Address of the first slot, and bytes from slot to slot."""
    return arena.shape[0] + arena.shape[5], arena.shape[6]


class MooncakeTransfer:
    """`Transfer` between all workers of a run of several hosts. `local`: between those of this host."""

    capabilities = TransferCapabilities(KIND, same_host=False, in_place=False)

    def __init__(self, own: OwnHost, directory: DirectoryFile, local: SharedMemoryTransfer) -> None:
        check_mooncake(trusted=own.trusted)
        self._own, self._directory, self._local = own, directory, local

    def sender(self) -> KvSender:
        sender, engine = self._local.sender(), _Engine(self._own)
        assert isinstance(sender.memory, Arena)
        engine.register(sender.memory)
        sender.describe = partial(_describe, self._own.name, engine, sender.memory, sender.describe)
        return sender

    def receiver(self) -> KvReceiver:
        return MooncakeReceiver(self._own, self._directory, self._local)


def _describe(
    name: str, engine: _Engine, arena: Arena, local: Describe, slots: Sequence[int], sums: Sequence[int]
) -> KvDescriptor:
    blocks = MooncakeBlocks(name, table_of(local, slots, sums), engine.session, *slots_of(arena))
    return KvDescriptor(KIND, msgspec.msgpack.encode(blocks))


class MooncakeReceiver(HostReceiver):
    """`KvReceiver`: threads read what the host's server brings otherwise."""

    kind: ClassVar[str] = KIND
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(MooncakeBlocks)

    def __init__(self, own: OwnHost, directory: DirectoryFile, local: SharedMemoryTransfer) -> None:
        super().__init__(own, directory, local)
        self._engine, self._registered = _Engine(own), False
        self._threads = ThreadPoolExecutor(_THREADS, "tripool-kv")
        self._reads: dict[Future[bool], RemoteKv] = {}

    def hear(self) -> None:
        for read in [read for read in self._reads if read.done()]:
            self._part_ended(self._reads.pop(read), good=read.exception() is None and read.result())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _ask(self, kv: RemoteKv) -> None:
        if not self._registered:
            self._engine.register(self.staging.arena)
            self._registered = True
        start, stride = slots_of(self.staging.arena)
        kv.parts_left = 1
        into = [start + slot * stride for slot in kv.slots]
        self._reads[self._threads.submit(self._read, self._engine, kv, into)] = kv

    def _read(self, engine: _Engine, kv: RemoteKv, into: list[int]) -> bool:
        if kv.closed:
            return False
        found = kv.found
        assert isinstance(found, MooncakeBlocks)
        source = [found.start + slot * found.stride for slot in found.table.slots]
        views = [self.staging.view(slot) for slot in kv.slots]
        return engine.read(found.session, into, source, self.staging.block_bytes) and all(
            checksum(view) == wanted for view, wanted in zip(views, kv.checksums, strict=True)
        )
