"""Blocks in a Mooncake Store (an extra), for a cache member: written through and read by key, in two threads.

| part of a value | contents |
|---|---|
| 32 bytes | magic, checksum, bytes, form, position |
| the rest | the block |

A key names model and code (the fingerprint), tenant and block, so that servers share what is equal and nothing else.
The store is a help, never a need: what it does not have or does not say in time is a miss.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tripool.cache.arena import Arena
from tripool.cache.lanes import Lanes
from tripool.cache.store_tier import StoreCopy, StoreTier, StoreWrite
from tripool.cache.tiered_index import Read, TieredIndex
from tripool.config import StoreConfig
from tripool.errors import StoreMissing

_LOG = logging.getLogger("tripool.cache")
_HEAD = struct.Struct("<8sQIII4x")
_MAGIC = b"TPSTORE1"
_BUFFER_BYTES = 64 * 2**20
"""Of Mooncake's client, for values on their way."""
_READ_AT_ONCE = 16


def store_class() -> Any:
    """Raises StoreMissing, with the remedy."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        hint = (
            f"pip install 'tripool[mooncake]', and the system's libibverbs (Debian: libibverbs1, librdmacm1): {error}"
        )
        raise StoreMissing("--mooncake-store needs Mooncake's package", hint=hint) from error
    return MooncakeDistributedStore


def open_store(config: StoreConfig) -> Any:
    """Raises StoreMissing, with the remedy."""
    store = store_class()()
    if store.setup(config.own_address, "P2PHANDSHAKE", 0, _BUFFER_BYTES, "tcp", "", config.master):
        hint = "is `mooncake_master` running there, and reachable? Mooncake's log before this line says more"
        raise StoreMissing(f"no Mooncake Store answers at {config.master}", hint=hint)
    return store


class MooncakeIo:
    """A member's use of the store; all but the threads' jobs is called in the member's loop."""

    def __init__(self, config: StoreConfig, tiered_index: TieredIndex, arena: Arena, num_slots: int) -> None:
        self._config, self._tiered_index, self._arena = config, tiered_index, arena
        self.state = "opening"
        """"opening", "on", or "off: " and the reason."""
        self.tier = StoreTier(num_slots)
        self._store: Any = None
        self._lanes = Lanes("store")
        self._lanes.writer.put(self._open)

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._lanes.fileno()

    def poll(self, now_s: float) -> None:
        self._lanes.settle()
        if self.state != "on":
            return
        reads = self._tiered_index.take_reads(self.tier)
        for start in range(0, len(reads), _READ_AT_ONCE):
            self._lanes.reader.put(partial(self._read, reads[start : start + _READ_AT_ONCE]))
        for write in self.tier.next_writes(now_s):
            self._lanes.writer.put(partial(self._write, write))

    def purge(self, namespace: bytes, then: Callable[[], None]) -> None:
        """`then` is called once the store has removed the tenant's blocks, and never if that fails."""
        if self.state.startswith("off"):
            then()
        else:
            self._lanes.writer.put(partial(self._remove, namespace, then), first=self.state == "on")

    def close(self) -> None:
        if self._lanes.close() and self._store is not None:
            self._store.close()

    # ---- in the threads ---------------------------------------------------------------------------------------------

    def _open(self) -> Callable[[], None]:
        try:
            self._store = open_store(self._config)
        except StoreMissing as error:
            return partial(self._off, error)
        return self._on

    def _name(self, namespace: bytes, key: bytes) -> str:
        return f"tripool-{self._config.fingerprint}-{namespace.hex()}-{key.hex()}"

    def _write(self, write: StoreWrite) -> Callable[[], None]:
        record = write.record
        block = np.empty(record.num_bytes, np.uint8)
        # The copy is what is summed up: the slot may hold another block by now.
        if self._arena.read(write.slot, block) != record.checksum:
            return partial(self.tier.written, record.key, False)
        head = _HEAD.pack(_MAGIC, record.checksum, record.num_bytes, record.form, record.position)
        code = self._store.put_parts(self._name(record.namespace, record.key), head, block)
        return partial(self._wrote, record.key, code)

    def _read(self, reads: Sequence[Read[StoreCopy]]) -> Callable[[], None]:
        """All of them in one round trip, and those that are there in another."""
        names = [self._name(read.copy.namespace, read.copy.key) for read in reads]
        there = self._store.batch_is_exist(names)
        found = [name for name, is_there in zip(names, there, strict=True) if is_there == 1]
        values = dict(zip(found, self._store.get_batch(found), strict=True)) if found else {}
        failed = any(is_there < 0 for is_there in there)
        placed = [self._place(read, values.get(name, b"")) for name, read in zip(names, reads, strict=True)]
        return partial(self._was_read, placed, failed)

    def _place(self, read: Read[StoreCopy], value: bytes) -> tuple[Read[StoreCopy], int | None]:
        """Into its slot. What is known of it now, and the checksum of what is there."""
        if len(value) < _HEAD.size:
            return read, None
        magic, checksum, num_bytes, form, position = _HEAD.unpack_from(value)
        block = memoryview(value)[_HEAD.size :]
        copy = StoreCopy(read.copy.key, read.copy.namespace, position, checksum, num_bytes, form)
        if magic != _MAGIC or len(block) != num_bytes or not 0 < num_bytes <= self._arena.slot_bytes:
            return replace(read, copy=copy), checksum ^ 1  # not what it should be
        return replace(read, copy=copy), self._arena.write(read.slot, block)

    def _remove(self, namespace: bytes, then: Callable[[], None]) -> Callable[[], None]:
        if self._store is None:
            return then
        code = self._store.remove_by_regex(f"^tripool-[0-9a-f]*-{namespace.hex()}-.*", True)
        return then if code >= 0 else self._failed

    # ---- in the loop ------------------------------------------------------------------------------------------------

    def _on(self) -> None:
        self.state = "on"
        _LOG.info("the Mooncake Store is on", extra={"master": self._config.master})
        self._tiered_index.add_tier(self.tier)

    def _off(self, error: StoreMissing) -> None:
        self.state = f"off: {error}"
        _LOG.warning("the Mooncake Store is off; memory goes on", extra={"error": error.code, "reason": str(error)})

    def _wrote(self, key: bytes, code: int) -> None:
        self.tier.written(key, code == 0)
        if code:
            self._failed()

    def _was_read(self, placed: Sequence[tuple[Read[StoreCopy], int | None]], failed: bool) -> None:
        for read, checksum in placed:
            self._tiered_index.was_read(read, checksum)
            if checksum is None and not failed:
                self.tier.was_read(read.copy, False)
        if failed:
            self._failed()

    def _failed(self) -> None:
        self.tier.failed()
        _LOG.warning("the Mooncake Store does not answer", extra={"failures": self.tier.counters.failures})
