"""Ids of a stream's events, by which a client says what it has: `Last-Event-ID`. Pure.

An id counts the tokens of each choice that the client has by this event, with a checksum of them: `12.9-5a1be330`. Of
a token with several events all but the last have the id of before, the choice and their number: `11.9-77fe0d4c/0/1`;
those after the last token `12.9-5a1be330/end/1`. Counting tokens and not events, an id is good for an answer that was
computed again, whatever order the choices came in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from tripool.errors import InvalidRequest
from tripool.gateway.job import Job
from tripool.router.kept_types import AnswerChanged

MAX_CHOICES = 16
"""Of a stream with ids: each has them all."""
_ID = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)-([0-9a-f]{8})(?:/(\d{1,9}|end)/(\d{1,9}))?")
_END = -1


class Have(NamedTuple):
    """What a client has."""

    counts: tuple[int, ...]
    checksum: int
    choice: int | None = None
    """Of whose next token it has some events; `_END`: of the stream's end."""
    num_events: int = 0


def read_id(given: str, num_choices: int) -> Have:
    """Raises InvalidRequest."""
    found = _ID.fullmatch(given)
    counts = tuple(map(int, found[1].split("."))) if found is not None else ()
    choice = None if found is None or found[3] is None else _END if found[3] == "end" else int(found[3])
    if found is None or len(counts) != num_choices or (choice is not None and choice >= num_choices):
        hint = "send the id of the last event of this request's stream as it came"
        raise InvalidRequest("this is no id of an event of this stream", hint=hint, param="Last-Event-ID")
    return Have(counts, int(found[2], 16), choice, int(found[4] or 0))


def event_ids_of(job: Job, last_event: str, *, in_events: bool) -> EventIds | None:
    """Of an answer that is a stream of events, under an idempotency key. Raises InvalidRequest. `last_event`: the last
    that the client has; empty: none."""
    if job.keyed is None or not job.stream or not in_events:
        return None
    num_choices = len(job.requests) * job.requests[0].params.n
    if num_choices > MAX_CHOICES:
        hint = "ask for fewer, without 'stream', or without a key"
        message = f"a stream with an idempotency key has {MAX_CHOICES} choices at most, not {num_choices}"
        raise InvalidRequest(message, hint=hint, param="n")
    return EventIds(num_choices, read_id(last_event, num_choices) if last_event else None)


class EventIds:
    """`token` takes what each token adds to a stream, `closing` what its end adds. What the client has already is left
    out, and nothing leaves before it is known to be of this answer."""

    def __init__(self, num_choices: int, have: Have | None = None) -> None:
        self._counts, self._sums = [0] * num_choices, [0] * num_choices
        self._have = have
        self._missing = sum(have.counts) if have is not None else 0
        """Tokens that the client has, and that did not come yet."""
        self._had: list[int] = [0] * num_choices
        """Checksums of what it has."""
        self._waiting: list[bytes] = []
        self._check()

    def token(self, choice: int, token_id: int, body: bytes | None) -> bytes | None:
        before = self._id() if body and body.count(b"\n\n") > 1 else ""
        index = self._counts[choice]
        self._counts[choice] = index + 1
        self._sums[choice] = crc32(token_id.to_bytes(8, "little"), self._sums[choice])
        have = self._have
        if have is None:
            return self._stamped(body, before, str(choice)) if body else None
        known = have.counts[choice]
        if index < known:
            self._missing -= 1
            if index + 1 == known:
                self._had[choice] = self._sums[choice]
            self._check()
            body = None
        elif body:
            skip = have.num_events if have.choice == choice and index == known else 0
            body = self._stamped(body, before, str(choice), skip)
        return self._released(body)

    def closing(self, body: bytes) -> bytes:
        have, last = self._have, self._id()
        if self._missing:
            self._differs()
        skip = have.num_events if have is not None and have.choice == _END else 0
        parts = body.split(b"\n\n")[:-1][skip:]
        stamped = b"".join(_with_id(part, f"{last}/end/{skip + i}") for i, part in enumerate(parts, 1))
        return (self._released(None) or b"") + stamped

    def _released(self, body: bytes | None) -> bytes | None:
        if self._missing:
            if body:
                self._waiting.append(body)
            return None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            return b"".join(waiting) + (body or b"")
        return body

    def _stamped(self, body: bytes, before: str, choice: str, skip: int = 0) -> bytes | None:
        if not before:
            return None if skip else _with_id(body[:-2], self._id())
        parts = body.split(b"\n\n")[:-1]
        ids = [f"{before}/{choice}/{i}" for i in range(1, len(parts))] + [self._id()]
        return b"".join(map(_with_id, parts[skip:], ids[skip:])) or None

    def _id(self) -> str:
        return f"{'.'.join(map(str, self._counts))}-{_sum(self._sums):08x}"

    def _check(self) -> None:
        if self._have is not None and not self._missing and _sum(self._had) != self._have.checksum:
            self._differs()

    def _differs(self) -> None:
        hint = "ask without 'Last-Event-ID' for the answer as it is now"
        raise AnswerChanged("this answer is not the one of which the client has a part", hint=hint)


def _sum(sums: Sequence[int]) -> int:
    """Of all choices together."""
    return sum(one * (2 * i + 1) for i, one in enumerate(sums)) & 0xFFFFFFFF


def _with_id(event: bytes, event_id: str) -> bytes:
    """Also in its data: the libraries of many clients hide the id."""
    at = event.find(b"data: {")
    if at >= 0:
        at += len(b"data: {")
        event = b'%s"event_id":"%s",%s' % (event[:at], event_id.encode(), event[at:])
    return b"%s\nid: %s\n\n" % (event, event_id.encode())
