"""WEKA's kv-cache-tester sessions (Claude Code): one JSON object per session, with its requests and those of subagents.

Times are seconds since the session's start, and sessions have no common clock: their starts are drawn. Ids name blocks
of one session, or of all where `hash_id_scope` is global. Sessions are loaded when they start: a folder of them may be
larger than memory. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

from tripool.bench.trace import BadTrace, TraceRequest, id_list, number, token_count
from tripool.simulate.rng import Rng

_EXPECTED = "a session of WEKA's kv-cache-tester: block_size, and requests with t, in, out and hash_ids"
_SESSION_BLOCKS = 1 << 32
"""More blocks than one session has."""
_MOST_DEPTH = 8


class BlockNames:
    """Numbers for chains of blocks: equal for two prompts as far as their ids agree from the first on."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._known: dict[tuple[int, int], int] = {}
        self._last: tuple[list[int], tuple[int, ...]] = [], ()

    def chain(self, ids: list[int]) -> tuple[int, ...]:
        """Most prompts of a session extend the one before: only what differs is looked up."""
        before, names = self._last
        low, high = 0, min(len(ids), len(before))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ids[low:middle] == before[low:middle] else (low, middle - 1)
        found, known, first = list(names[:low]), self._known, self._first
        parent = found[-1] if found else -1
        for each in ids[low:]:
            parent = known.setdefault((parent, each), first + len(known))
            found.append(parent)
        self._last = ids, tuple(found)
        return self._last[1]


class Sessions:
    """`load`: the record of a session by its place among all, and the name of its file or line."""

    def __init__(self, count: int, load: Callable[[int], tuple[dict[str, Any], str]], per_minute: float, seed: int):
        rng = Rng(seed)
        gaps_s = [0.0, *(60.0 * rng.exponential() / per_minute for _ in range(count - 1))]
        self._starts_s = list(accumulate(gaps_s))
        self._load = load
        self.num_unanswered = 0
        """Requests without an answer, of the sessions that the last pass has loaded; they are left out."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """In order of arrival."""
        self.num_unanswered = 0
        shared = BlockNames()
        due: list[tuple[float, int, Iterator[TraceRequest], TraceRequest]] = []
        for place, start_s in enumerate(self._starts_s):
            while due and due[0][0] <= start_s:
                yield _next(due)
            record, where = self._load(place)
            is_local = record.get("hash_id_scope", "local") == "local"
            names = BlockNames((place + 1) * _SESSION_BLOCKS) if is_local else shared
            _add(due, place, iter(self._requests(record, where, start_s, names)))
        while due:
            yield _next(due)

    def _requests(self, record: dict[str, Any], where: str, start_s: float, names: BlockNames) -> list[TraceRequest]:
        block_tokens = token_count(record, "block_size", where)
        found = sorted(_flat(record, where, 0.0), key=lambda each: each[0])
        self.num_unanswered += sum(not answer for _, _, answer, _ in found)
        return [
            TraceRequest(
                start_s + at_s,
                prompt,
                answer,
                names.chain(ids[: -(-prompt // block_tokens)]),
                block_tokens=block_tokens,
            )
            for at_s, prompt, answer, ids in found
            if answer
        ]


def _add(due: list[Any], place: int, rest: Iterator[TraceRequest]) -> None:
    request = next(rest, None)
    if request is not None:
        heappush(due, (request.arrival_s, place, rest, request))


def _next(due: list[Any]) -> TraceRequest:
    _, place, rest, request = heappop(due)
    _add(due, place, rest)
    found: TraceRequest = request
    return found


def _flat(
    record: dict[str, Any], where: str, start_s: float, depth: int = 0
) -> Iterator[tuple[float, int, int, list[int]]]:
    """(seconds, prompt, answer, ids) of all requests; a subagent's times are since its own start."""
    if depth > _MOST_DEPTH:
        raise BadTrace(f"{where}: subagents within subagents, {depth} deep", hint=f"at most {_MOST_DEPTH}")
    requests = record.get("requests")
    if not isinstance(requests, list):
        raise BadTrace(f"{where}: requests is no list", hint=_EXPECTED)
    for place, each in enumerate(requests):
        here = f"{where}, requests[{place}]"
        if not isinstance(each, dict):
            raise BadTrace(f"{here} is not an object", hint=_EXPECTED)
        at_s = start_s + number(each, "t", here, "seconds since the session's start, 0 or more")
        if each.get("type") == "subagent":
            yield from _flat(each, here, at_s, depth + 1)
        else:
            prompt, answer = token_count(each, "in", here), token_count(each, "out", here, least=0)
            yield at_s, prompt, answer, id_list(each, "hash_ids", here)
