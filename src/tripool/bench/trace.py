"""Mooncake traces: arrival times, prompt and answer lengths, and shared prompt blocks.

Takes lines and opens no file. A block's id stands for its tokens and everything before them, so two requests share a
prefix exactly as far as their ids agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tripool.errors import InvalidRequest

TRACE_BLOCK_TOKENS = 512
"""Tokens per block in Mooncake's own traces."""


class BadTrace(InvalidRequest):
    """A trace that cannot be replayed; the message names the line."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    """Since the first request of the trace."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """One per block of the prompt; the last block may be partly filled, or missing when only full ones were hashed."""


def parse_trace(
    lines: Iterable[str], *, block_tokens: int = TRACE_BLOCK_TOKENS, max_requests: int | None = None
) -> list[TraceRequest]:
    """In order of arrival. Blank lines are skipped; `max_requests` keeps the first ones of the file."""
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if max_requests is not None and len(requests) >= max_requests:
            break
        if line.strip():
            requests.append(_request(line, number, block_tokens))
    if not requests:
        raise BadTrace("the trace holds no requests", hint="one JSON object per line, as Mooncake publishes them")
    begin_s = min(request.arrival_s for request in requests)
    shifted = (TraceRequest(r.arrival_s - begin_s, r.input_tokens, r.output_tokens, r.block_ids) for r in requests)
    return sorted(shifted, key=lambda request: request.arrival_s)


def _request(line: str, number: int, block_tokens: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BadTrace(f"line {number} is not JSON: {error}", hint="one JSON object per line") from error
    if not isinstance(fields, dict):
        raise BadTrace(f"line {number} is not an object", hint="one JSON object per line")
    timestamp_ms = fields.get("timestamp")
    if not isinstance(timestamp_ms, (int, float)) or isinstance(timestamp_ms, bool) or not 0 <= timestamp_ms < 1e15:
        raise BadTrace(f"line {number}: timestamp is {timestamp_ms!r}", hint="milliseconds, 0 or more")
    input_tokens, output_tokens = (_count(fields, name, number) for name in ("input_length", "output_length"))
    block_ids = fields.get("hash_ids")
    if not isinstance(block_ids, list) or not all(type(block_id) is int for block_id in block_ids):
        raise BadTrace(f"line {number}: hash_ids is no list of integers", hint="one id per block of the prompt")
    full, partly = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if len(block_ids) not in (full, partly):
        problem = f"line {number}: {input_tokens} tokens have {partly} blocks of {block_tokens}, not {len(block_ids)}"
        raise BadTrace(problem, hint="--block-tokens says how many tokens the trace hashes together")
    return TraceRequest(timestamp_ms / 1e3, input_tokens, output_tokens, tuple(block_ids))


def _count(fields: dict[str, Any], name: str, number: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise BadTrace(f"line {number}: {name} is {value!r}", hint="a number of tokens, 1 or more")
    return value
