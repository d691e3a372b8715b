"""Compiles an untrusted grammar in a separate process first, where it can neither crash nor stall the server.

llguidance's limits do not bound everything: a chain of a few thousand rules overflows the stack, and some schemas take
minutes. A grammar that passes compiles in the engine's process in about the same time and delays no other answer: the
times to compile, copy and follow it are measured here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tripool.core import Structure
from tripool.errors import InvalidRequest, TripoolError
from tripool.grammar import trial_process
from tripool.grammar.owned import OwnedCache
from tripool.grammar.translate import LIMITS, grammar_text, in_words

# Bounds the text that a grammar spells out. The cost of a mask grows with the literal: llguidance reads all of it again
# for every byte of every token. At this bound a mask takes a millisecond; a literal as long as a request, thirty.
MAX_LITERAL_BYTES = 4096
_RUN = re.compile(r"[\w ]+")
"""In a pattern or a grammar: certainly a literal, or a name."""
_NO_TEXT = frozenset({"description", "title", "$comment", "default", "examples", "$id", "$schema"})
"""Keywords of a schema or a function that do not affect answers."""


def check_literals(structure: Structure) -> None:
    """Raises InvalidRequest for a literal that is too long. Those composed of several parts are left to the trial."""
    for text in _literals(structure):
        size = len(text.encode()) if 4 * len(text) > MAX_LITERAL_BYTES else 0
        if size > MAX_LITERAL_BYTES:
            hint = f"at most {MAX_LITERAL_BYTES} bytes each, such as a choice, a constant or a name"
            raise InvalidRequest(f"the {structure.kind} has a text of {size} bytes", hint=hint, param=structure.param)


def _literals(structure: Structure) -> Iterator[str]:
    if structure.kind in ("json_schema", "tool_calls"):
        yield from _strings(json.loads(structure.value))
    elif structure.kind == "choice":
        yield from structure.value
    elif structure.kind in ("regex", "ebnf"):
        yield from _RUN.findall(structure.value)


def _strings(schema: Any) -> Iterator[str]:
    if isinstance(schema, str):
        yield schema
    elif isinstance(schema, list):
        for item in schema:
            yield from _strings(item)
    elif isinstance(schema, dict):
        for name, item in schema.items():
            yield name
            if name not in _NO_TEXT or not isinstance(item, str):
                yield from _strings(item)


CPU_S = 0.5
MOST: Mapping[str, float] = {"compile_s": 0.2, "copy_s": 0.004, "follow_s": 0.1}
"""CPU time to compile it, to copy it, and to follow it over the bytes of a long token. Real grammars take a sixth at
most, an object with 400 optional properties a fifth."""
MEMORY_BYTES = 2**30
MAX_KEPT = 64
"""Cached verdicts per tenant."""
_MAX_TENANTS = 256
_SMALL_BYTES = 4096
"""Choices of this total size are harmless, whatever they contain."""
_SLOW_HINT = "shorter texts, fewer alternatives, smaller numbers in repetitions and multiples"
_WALL_S = 30.0


class TrialFailed(TripoolError, status=503, code="grammar_trial_failed"):
    """Not the grammar's fault: no process could be started for it."""


class Trial:
    """Thread-safe. Takes about 100 ms, once for each of a tenant's last structures: not on an event loop."""

    def __init__(self, *, cpu_s: float = CPU_S, most: Mapping[str, float] = MOST) -> None:
        self._cpu_s, self._most = cpu_s, most
        self._lock = threading.Lock()
        self._verdicts: OwnedCache[str] = OwnedCache(per_tenant=MAX_KEPT, max_tenants=_MAX_TENANTS)

    def is_known(self, structure: Structure, namespace: str = "") -> bool:
        """Whether `check` returns at once."""
        if _is_harmless(structure):
            return True
        with self._lock:
            return self._verdicts.get(namespace, structure) is not None

    def check(self, structure: Structure, namespace: str = "") -> None:
        """Raises InvalidRequest when the grammar is invalid or too expensive. `namespace`: its owner."""
        if _is_harmless(structure):
            return
        with self._lock:
            verdict = self._verdicts.get(namespace, structure)
        if verdict is None:
            verdict = self._try(structure)
            with self._lock:
                self._verdicts.put(namespace, structure, verdict)
        if verdict:
            hint = _SLOW_HINT if verdict.startswith(trial_process.SLOW) else ""
            reason = in_words(verdict, structure)
            raise InvalidRequest(f"the {structure.kind} cannot be used: {reason}", hint=hint, param=structure.param)

    def _try(self, structure: Structure) -> str:
        """The problem; empty when there is none."""
        # Translating EBNF runs Python code that takes long for some grammars: it is tried as well.
        ebnf = structure.kind == "ebnf"
        check_literals(structure)
        grammar = structure.value if ebnf else grammar_text(structure)
        bounds = {"limits": LIMITS, "cpu_s": self._cpu_s, "memory_bytes": MEMORY_BYTES, "most": self._most}
        task = {"grammar": grammar, "ebnf": ebnf, **bounds}
        command = [sys.executable, "-I", str(Path(trial_process.__file__))]
        try:
            done = subprocess.run(
                command, input=json.dumps(task).encode(), capture_output=True, timeout=_WALL_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TrialFailed("the machine is too busy to try the grammar", hint="try again later") from error
        except OSError as error:
            raise TrialFailed(f"cannot start a process to try the grammar: {error.strerror}") from error
        if done.returncode == 0 and done.stdout.startswith(trial_process.TRIED):
            return done.stdout.removeprefix(trial_process.TRIED).decode()
        if done.returncode < 0:  # killed by the timer, for its memory, or by a stack overflow
            return "it is too deep, or takes too long or too much memory to compile"
        raise TrialFailed(f"cannot try the grammar: {done.stderr.decode(errors='replace')[-300:]}")


def _is_harmless(structure: Structure) -> bool:
    """Whether the caller decides nothing but its size, and it is small."""
    return structure.kind == "json_object" or (
        structure.kind == "choice" and sum(len(text.encode()) for text in structure.value) <= _SMALL_BYTES
    )
