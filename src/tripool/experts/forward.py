"""Forwards the requests and answers of an exchange to another host, plain: the reference for `native/forward.c`.

Each host has a shared memory of the exchange to itself. A forwarder takes what ranks here ask of ranks there, and what
ranks here have answered them, out of this host's memory; the other host's forwarder puts it into its own, the payload
first and the doorbell last, as if the other rank were on that host. So no rank knows on which host another is.

| record | contents |
|---|---|
| all | eight numbers of 32 bits: kind, bytes, source, lane, and four of its kind; the whole is a multiple of 8 bytes |
| request | layer, targets, rows; each target's doorbell, rank and offset; their entries; numbers of rows; the rows |
| answer | destination, offset, count; the doorbell; float32 rows |
| routed | rows that a rank has routed to each expert |

A row travels once per host: of the rows that a request needs, only those are taken that the other host does not have
yet from this exchange. It has them if an earlier request of the lane under the same epoch is open: the owner then has
not written the lane again. On a new connection everything open is sent again; what arrives twice does no harm.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from tripool.experts.exchange import SharedView
from tripool.experts.layout import ENTRY, GROUP, LANES, Bell

HEAD = struct.Struct("<8I")
_TARGET = struct.Struct("<Q2I")
REQUEST, ANSWER, ROUTED = 1, 2, 3


class Forwarder:
    """`here`, `there`: for each rank, whether it is one of this host, of the other one."""

    def __init__(self, view: SharedView, here: Sequence[bool], there: Sequence[bool]) -> None:
        self._view = view
        self._here, self._there = ([rank for rank, yes in enumerate(which) if yes] for which in (here, there))
        self.restart()

    def restart(self) -> None:
        """A new connection: what is open is sent again."""
        self._sent: dict[tuple[int, int, int], Bell] = {}
        """(source, destination, lane) -> the newest request that was taken."""
        self._returned: dict[tuple[int, int, int], Bell] = {}
        self._rows: dict[tuple[int, int], set[int]] = {}

    # ---- out of this host's memory ----------------------------------------------------------------------------------

    def take(self) -> bytes:
        return b"".join(self._records())

    def _records(self) -> Iterator[bytes]:
        for source in range(self._view.layout.ranks):
            for lane in range(LANES):
                if source in self._here:
                    yield self._requests(source, lane)
                elif source in self._there:
                    yield from (self._answer(source, destination, lane) for destination in self._here)

    def _requests(self, source: int, lane: int) -> bytes:
        slab, targets = self._view.slab(source, lane), []
        most = self._view.layout.entries
        for destination in self._there:
            key = source, destination, lane
            bell = self._view.dispatch_bell(destination, source, lane).read()
            if not bell.pack() or bell == self._sent.get(key) or bell == self._answered(*key):
                continue
            offset, count = slab.segments[destination].tolist()
            if count == bell.count and offset + count <= most:
                targets.append((bell, destination, offset))
            else:  # given up: the lane is being written again
                self._sent[key] = bell
        if not targets:
            return b""
        epochs = {bell.epoch for bell, _, _ in targets}
        if len(epochs) > 1 or not self._same_exchange(source, lane, epochs.pop()):
            self._rows[source, lane] = set()
        known, rows, entries = self._rows[source, lane], [], []
        for bell, destination, offset in targets:
            entries.append(slab.entries[offset : offset + bell.count].copy())
            self._sent[source, destination, lane] = bell
        for row in np.concatenate(entries)["row"].tolist():
            if row < self._view.layout.slab_rows and row not in known:
                known.add(row)
                rows.append(row)
        body = b"".join(_TARGET.pack(bell.pack(), destination, offset) for bell, destination, offset in targets)
        body += b"".join(entry.tobytes() for entry in entries) + _eight(np.array(rows, "<u4").tobytes())
        for row in rows:
            body += b"".join(part[row].tobytes() for part in (slab.rows.scales, slab.rows.fixes, slab.rows.values))
        return _record(REQUEST, source, lane, int(slab.head[0]["layer"]), len(targets), len(rows), body)

    def _same_exchange(self, source: int, lane: int, epoch: int) -> bool:
        sent = {rank: self._sent.get((source, rank, lane)) for rank in self._there}
        return any(
            bell is not None and bell.epoch == epoch and bell != self._answered(source, rank, lane)
            for rank, bell in sent.items()
        )

    def _answered(self, source: int, destination: int, lane: int) -> Bell:
        return self._view.combine_bell(source, destination, lane).read()

    def _answer(self, source: int, destination: int, lane: int) -> bytes:
        key, bell = (source, destination, lane), self._answered(source, destination, lane)
        if not bell.pack() or bell == self._returned.get(key):
            return b""
        self._returned[key] = bell
        offset, count = self._view.slab(source, lane).segments[destination].tolist()
        if count != bell.count or offset + count > self._view.layout.entries:
            return b""  # its source has given it up
        rows = self._view.answers(destination, source, lane)[offset : offset + count]
        body = struct.pack("<Q", bell.pack()) + _eight(rows.tobytes())
        return _record(ANSWER, source, lane, destination, offset, count, body)

    # ---- into this host's memory ------------------------------------------------------------------------------------

    def put(self, data: bytes) -> bool:
        """False: these are no records of this exchange. What comes before a wrong one counts."""
        at = 0
        while at < len(data):
            if len(data) - at < HEAD.size:
                return False
            head = HEAD.unpack_from(data, at)
            size = head[1]
            if size < HEAD.size or size % 8 or size > len(data) - at:
                return False
            put = {REQUEST: self._put_requests, ANSWER: self._put_answer, ROUTED: self._put_routed}.get(head[0])
            if put is None or not put(head, data[at + HEAD.size : at + size]):
                return False
            at += size
        return True

    def _put_requests(self, head: Sequence[int], body: bytes) -> bool:
        _, _, source, lane, layer, num_targets, num_rows, _ = head
        layout = self._view.layout
        wrong = source not in self._there or lane >= LANES or layer >= layout.layers or num_rows > layout.slab_rows
        if wrong or num_targets > layout.ranks or len(body) < _TARGET.size * num_targets:
            return False
        targets = [
            (Bell.unpack(bell), rank, offset)
            for bell, rank, offset in _TARGET.iter_unpack(body[: _TARGET.size * num_targets])
        ]
        if any(rank not in self._here or offset + bell.count > layout.entries for bell, rank, offset in targets):
            return False
        total, at = sum(bell.count for bell, _, _ in targets), _TARGET.size * num_targets
        row_bytes, rows_at = (GROUP + 8) * layout.groups, at + ENTRY.itemsize * total
        data_at = rows_at + len(_eight(bytes(4 * num_rows)))
        if total > layout.entries or len(body) != data_at + num_rows * row_bytes:
            return False
        numbers = np.frombuffer(body, "<u4", num_rows, rows_at)
        if (numbers >= layout.slab_rows).any():
            return False
        slab, groups = self._view.slab(source, lane), layout.groups
        for number in numbers.tolist():
            slab.rows.scales[number] = np.frombuffer(body, "<f4", groups, data_at)
            slab.rows.fixes[number] = np.frombuffer(body, "<i4", groups, data_at + 4 * groups)
            slab.rows.values[number] = np.frombuffer(body, np.int8, GROUP * groups, data_at + 8 * groups)
            data_at += row_bytes
        slab.head["layer"] = layer
        entries = np.frombuffer(body, ENTRY, total, at)
        for bell, rank, offset in targets:
            slab.entries[offset : offset + bell.count], entries = entries[: bell.count], entries[bell.count :]
            slab.segments[rank] = (offset, bell.count)
        for bell, rank, _ in targets:
            self._view.dispatch_bell(rank, source, lane).ring(bell)
        return True

    def _put_answer(self, head: Sequence[int], body: bytes) -> bool:
        _, _, source, lane, destination, offset, count, _ = head
        layout = self._view.layout
        size = 8 + len(_eight(bytes(4 * layout.hidden * count))) if count <= layout.entries else -1
        if source not in self._here or lane >= LANES or destination not in self._there or len(body) != size:
            return False
        bell = Bell.unpack(struct.unpack_from("<Q", body)[0])
        if bell.count != count or offset + count > layout.entries:
            return False
        rows = np.frombuffer(body, "<f4", count * layout.hidden, 8).reshape(count, layout.hidden)
        self._view.answers(destination, source, lane)[offset : offset + count] = rows
        self._view.combine_bell(source, destination, lane).ring(bell)
        return True

    def _put_routed(self, head: Sequence[int], body: bytes) -> bool:
        layout = self._view.layout
        if head[2] not in self._there or len(body) != layout.routed_bytes:
            return False
        self._view.routed(head[2])[:] = np.frombuffer(body, "<u8", layout.layers * layout.experts).reshape(
            layout.layers, layout.experts
        )
        return True


def routed_record(view: SharedView, rank: int) -> bytes:
    """What a rank here has routed, for the host that balances loads."""
    body = view.routed(rank).tobytes()
    return _record(ROUTED, rank, 0, 0, 0, 0, body + bytes(view.layout.routed_bytes - len(body)))


def _record(kind: int, source: int, lane: int, a: int, b: int, c: int, body: bytes) -> bytes:
    return HEAD.pack(kind, HEAD.size + len(body), source, lane, a, b, c, 0) + body


def _eight(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
