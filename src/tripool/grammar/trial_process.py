"""The process in which `Trial` compiles: run as a file, so that it starts without loading the package.

Reads one task from standard input and writes `TRIED` and what is wrong with its grammar to standard output: without the
mark nothing was tried, whatever the exit status. Takes no more than its share of processor time and memory: the kernel
ends it. Runs at a lower priority than the server, which must not notice it, but not at the lowest: whoever sent the
grammar waits for it, also while the processors are busy.
"""

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

MAX_MESSAGE_CHARS = 500
TRIED = b"tried:"
"""An exception in the thread that compiles ends the thread alone."""
_STACK_BYTES = 2**20
"""Less than any thread that compiles in earnest: what fits here has room to spare there."""
_END = 256
_NICE = 10
"""A tenth of what the server gets where they compete."""


class _Bytes:
    """The least vocabulary that can spell everything."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (_END,)

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)


def main() -> None:
    os.nice(_NICE)
    import llguidance  # noqa: F401 (most of the time that this takes: at the lower priority, before the limits count)

    task = json.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_AS, (task["memory_bytes"], task["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])  # its signal ends a process that does not handle it
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(task,))
    thread.start()
    thread.join()


def _compile(task: dict[str, Any]) -> None:
    sys.stdout.buffer.write(TRIED + _wrong_with(task)[:MAX_MESSAGE_CHARS].encode())


def _wrong_with(task: dict[str, Any]) -> str:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

    grammar = task["grammar"]
    if task["ebnf"]:
        try:
            grammar = grammar_from("ebnf", grammar)
        except ValueError as error:
            return str(error)
    limits = LLParserLimits(verbose_errors=False, **task["limits"])
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_END)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    # The first mask, and the one behind what every answer begins with: there most grammars that are too large give up.
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error() and matcher.consume_tokens(list(matcher.compute_ff_bytes())):
        matcher.compute_bitmask()
    return matcher.get_error()


if __name__ == "__main__":
    main()
