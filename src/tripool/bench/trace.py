"""Requests of a trace: arrival times, prompt and answer lengths, shared prompt blocks; and Mooncake's format of them.

Takes lines and opens no file. A block's id stands for its tokens and everything before them, so two requests share a
prefix exactly as far as their ids agree. `parse_object`, `number` and `token_count` check fields of a record for every
format.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tripool.errors import InvalidRequest

TRACE_BLOCK_TOKENS = 512
"""Tokens per block in Mooncake's own traces."""
_MOST_TOKENS = 2**24
_MOST_TIME = 1e17
"""Since 1970 in microseconds it is 1e15."""


class BadTrace(InvalidRequest, code="bad_trace"):
    """A trace that cannot be replayed; the message names the line."""


_POPULAR = 8
"""A block that came so often is in the memory of most instances by now."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    """Since the first request of the trace."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """One per block of the prompt; the last block may be partly filled, or missing when only full ones were hashed.
    Empty: it shares nothing."""
    tenant: str = ""
    block_tokens: int = TRACE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace in the few numbers that a plan or a simulation needs."""

    num_requests: int = 0
    input_tokens: float
    output_tokens: float
    """Means."""
    cached_share: float = 0.0
    """Share of prompt tokens in a prefix that came before: what a cache that forgets nothing finds."""
    cached_block_share: float = 0.0
    popular_share: float = 0.0
    """Share of those tokens whose block had come often: every instance has it in its own memory."""
    num_blocks: int = 0
    """Of all prompts together."""
    span_s: float = 0.0
    input_square: float = 0.0
    cached_square: float = 0.0
    """Means of squared lengths of prompts, and of prefixes that came before."""
    decode_context: float = 0.0
    """Mean context over all steps of decoding: a request counts once per token of its answer."""
    held: float = 0.0
    held_spread: float = 0.0
    """Likewise mean and standard deviation of prompt and answer together."""
    longest: int = 0
    longest_input: int = 0
    block_tokens: int = TRACE_BLOCK_TOKENS
    names_blocks: bool = True
    """False: the trace does not say which prompts share a prefix, and nothing can be said about reuse."""

    @property
    def requests_per_s(self) -> float | None:
        """None: one request, or all at once."""
        return (self.num_requests - 1) / self.span_s if self.span_s > 0 else None


def measure_trace(requests: Iterable[TraceRequest]) -> Workload:
    seen_by_tenant: defaultdict[str, dict[int, int]] = defaultdict(dict)
    count = popular_blocks = known_blocks = num_blocks = known_tokens = prompts = answers = 0
    input_square = cached_square = contexts = held = held_square = longest = longest_input = 0
    first_s = last_s = 0.0
    names_blocks, block_tokens = False, TRACE_BLOCK_TOKENS
    for request in requests:
        first_s, last_s = first_s if count else request.arrival_s, request.arrival_s
        count += 1
        prompts += request.input_tokens
        answers += request.output_tokens
        ids, seen = request.block_ids, seen_by_tenant[request.tenant]
        if ids:
            names_blocks, block_tokens = True, request.block_tokens
        known = next((place for place, block_id in enumerate(ids) if block_id not in seen), len(ids))
        for place, block_id in enumerate(ids):
            times = seen.get(block_id, 0)
            seen[block_id] = times + 1
            popular_blocks += place < known and times >= _POPULAR
        known_blocks += known
        num_blocks += len(ids) or -(-request.input_tokens // request.block_tokens)
        # The last token is always computed: something has to be sampled from.
        cached = min(known * request.block_tokens, request.input_tokens - 1)
        known_tokens += cached
        prompt, answer = request.input_tokens, request.output_tokens
        input_square += prompt**2
        cached_square += cached**2
        contexts += answer * (2 * prompt + answer)
        held += answer * (prompt + answer)
        held_square += answer * (prompt + answer) ** 2
        longest, longest_input = max(longest, prompt + answer), max(longest_input, prompt)
    steps = max(1, answers)
    return Workload(
        num_requests=count, input_tokens=prompts / max(1, count), output_tokens=answers / max(1, count),
        cached_share=known_tokens / max(1, prompts), cached_block_share=known_blocks / max(1, num_blocks),
        popular_share=popular_blocks / max(1, known_blocks),
        input_square=input_square / max(1, count), cached_square=cached_square / max(1, count),
        decode_context=contexts / 2 / steps, held=held / steps,
        held_spread=max(0.0, held_square / steps - (held / steps) ** 2) ** 0.5, longest=longest,
        longest_input=longest_input,
        num_blocks=num_blocks, span_s=last_s - first_s, block_tokens=block_tokens, names_blocks=names_blocks,
    )  # fmt: skip


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
    shifted = (replace(request, arrival_s=request.arrival_s - begin_s) for request in requests)
    return sorted(shifted, key=lambda request: request.arrival_s)


def _request(line: str, number_of_line: int, block_tokens: int) -> TraceRequest:
    where = f"line {number_of_line}"
    fields = parse_object(line, where)
    timestamp_ms = number(fields, "timestamp", where, "milliseconds, 0 or more")
    input_tokens, output_tokens = (token_count(fields, name, where) for name in ("input_length", "output_length"))
    block_ids = id_list(fields, "hash_ids", where)
    full, partly = input_tokens // block_tokens, -(-input_tokens // block_tokens)
    if len(block_ids) not in (full, partly):
        problem = f"{where}: {input_tokens} tokens have {partly} blocks of {block_tokens}, not {len(block_ids)}"
        raise BadTrace(problem, hint="`tripool bench --block-tokens` says how many tokens a trace hashes together")
    return TraceRequest(timestamp_ms / 1e3, input_tokens, output_tokens, tuple(block_ids), block_tokens=block_tokens)


# ---- fields of a record, in any format ------------------------------------------------------------------------------


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{where} is not JSON: {error}", hint="one JSON object per line") from None
    if not isinstance(fields, dict):
        raise BadTrace(f"{where} is not an object", hint="one JSON object per line")
    return fields


def number(fields: Mapping[str, Any], name: str, where: str, expected: str) -> float:
    """0 or more. `expected`: said when it is something else."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST_TIME:
        raise _wrong(where, name, value, expected)
    return value


def token_count(fields: Mapping[str, Any], name: str, where: str, *, least: int = 1) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value < _MOST_TOKENS:
        raise _wrong(where, name, value, f"a number of tokens, {least} or more and below {_MOST_TOKENS:,}")
    return value


def id_list(fields: Mapping[str, Any], name: str, where: str, *, missing: list[int] | None = None) -> list[int]:
    value = fields.get(name, missing)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise BadTrace(f"{where}: {name} is no list of integers", hint="one id per block or part of the prompt")
    return value


def _wrong(where: str, name: str, value: object, expected: str) -> BadTrace:
    said = repr(value)
    return BadTrace(f"{where}: {name} is {said if len(said) <= 60 else said[:60] + '...'}", hint=expected)
