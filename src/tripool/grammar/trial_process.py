"""The process in which `Trial` compiles and measures: run as a file, so that it starts without loading the package.

Reads one task from standard input and writes `TRIED` and the grammar's problem, if any, to standard output: without the
mark nothing was tried, whatever the exit status. The kernel enforces its limits of CPU time and memory. Its priority is
lower than the server's, so as not to disturb it, but not the lowest: the client waits for it, also under load.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

MAX_MESSAGE_CHARS = 500
TRIED = b"tried:"
"""Marks a result: an exception in the compiling thread ends that thread alone."""
_STACK_BYTES = 2**20
"""Less than any thread that compiles in the server has: what fits here fits there."""
SLOW = "it takes too long "
_TRIES = 2
"""Runs of a slow step: the faster one counts, so that a busy machine refuses nothing."""
_LONG_TOKEN_BYTES = 16
"""A mask looks ahead as far as the longest token that fits: about this many bytes of an answer."""
_FOLLOWED_BYTES = 2 * _LONG_TOKEN_BYTES
_END = 256
_NICE = 10
"""A tenth of the server's share under contention."""


class _Bytes:
    """The smallest vocabulary that can spell everything."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (_END,)

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)


def main() -> None:
    os.nice(_NICE)
    import llguidance  # noqa: F401 (the slowest part: at the lower priority, before the limits apply)

    task = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], task["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])  # the unhandled signal ends the process
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(task,))
    thread.start()
    thread.join()


def _compile(task: dict[str, Any]) -> None:
    sys.stdout.buffer.write(TRIED + _wrong_with(task)[:MAX_MESSAGE_CHARS].encode())


def _wrong_with(task: dict[str, Any]) -> str:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    grammar, most = task["grammar"], task["most"]
    if task["ebnf"]:
        try:
            grammar = grammar_from("ebnf", grammar)
        except ValueError as error:
            return str(error)
    limits = LLParserLimits(verbose_errors=False, **task["limits"])
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_END)
    compiled, compile_s = _least(partial(LLMatcher, vocabulary, grammar, log_level=0, limits=limits), most["compile_s"])
    if compiled.is_error():
        return str(compiled.get_error())
    # The first mask, and the one after the usual first token: most grammars that are too large give up there.
    matcher = compiled.deep_copy()
    matcher.compute_bitmask()
    if not matcher.is_error() and matcher.consume_tokens(list(matcher.compute_ff_bytes())):
        matcher.compute_bitmask()
    if matcher.is_error():
        return str(matcher.get_error())
    if compile_s > most["compile_s"]:
        return SLOW + "to compile"
    if _least(compiled.deep_copy, most["copy_s"])[1] > most["copy_s"]:
        return SLOW + "to copy for every answer"
    if all(_slowest_s(compiled.deep_copy()) > most["follow_s"] for _ in range(_TRIES)):
        return SLOW + "to follow in an answer"
    return ""


def _least(make: Callable[[], Any], most_s: float) -> tuple[Any, float]:
    """The result, and the CPU time that it takes; retried when that is too much."""
    least_s = float("inf")
    for _ in range(_TRIES):
        began_s = time.thread_time()
        made = make()
        least_s = min(least_s, time.thread_time() - began_s)
        if least_s <= most_s:
            break
    return made, least_s


def _slowest_s(matcher: Any) -> float:
    """CPU time of the slowest token-sized stretch of a random answer."""
    rng, slowest_s = Random(0), 0.0
    for _ in range(0, _FOLLOWED_BYTES, _LONG_TOKEN_BYTES):
        stretch_s = 0.0
        for _ in range(_LONG_TOKEN_BYTES):
            began_s = time.thread_time()
            mask = matcher.compute_bitmask()
            stretch_s += time.thread_time() - began_s
            allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
            if matcher.is_error() or not allowed:
                return max(slowest_s, stretch_s)
            began_s = time.thread_time()
            matcher.consume_token(rng.choice(allowed))
            stretch_s += time.thread_time() - began_s
        slowest_s = max(slowest_s, stretch_s)
    return slowest_s


if __name__ == "__main__":
    main()
