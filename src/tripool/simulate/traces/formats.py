"""Recognises a trace's format by the beginning of a file. Pure."""

from __future__ import annotations

from re import compile as pattern

from tripool.simulate.traces.azure import HEADER

MOONCAKE, AZURE, SERVEGEN, RAGPULSE, RAGPULSE_LENGTHS, WEKA, LMCACHE = (
    "Mooncake", "Azure", "ServeGen", "RAGPulse", "RAGPulse's lengths", "WEKA", "LMCache",
)  # fmt: skip
EXPECTED = (
    "Mooncake .jsonl, Azure .csv, a ServeGen folder, RAGPulse .jsonl, WEKA .json sessions or LMCache .jsonl; "
    "docs/simulation.md shows each"
)
HEAD_BYTES = 2**16

_CLIENT = pattern(r"(?:.*/)?chunk-\d+-(?:trace\.csv|dataset\.json)")
_MARKS = (
    (WEKA, pattern(r'"requests"\s*:\s*\[')),
    (RAGPULSE, pattern(r'"hash_ids"\s*:\s*\{')),
    (RAGPULSE_LENGTHS, pattern(r'"token_length"\s*:')),
    (MOONCAKE, pattern(r'"(?:hash_ids"\s*:\s*\[|input_length"\s*:)')),
    (LMCACHE, pattern(r'"(?:input|output)"\s*:')),
    (MOONCAKE, pattern(r'"timestamp"\s*:')),
)
"""Keys of one format. A quote within a text is escaped, so that a text cannot hold one of these."""


def recognise(name: str, head: bytes) -> str | None:
    """From a file's name (only ServeGen's have a form) and its first bytes; None: none of them."""
    if _CLIENT.fullmatch(name):
        return SERVEGEN
    text = head.decode("utf-8", errors="ignore").lstrip("\ufeff").lstrip()
    if text.startswith(HEADER):
        return AZURE
    if not text.startswith("{"):
        return None
    first_line = text.partition("\n{")[0]
    return next((kind for kind, mark in _MARKS if mark.search(first_line)), None)


def foreign(head: bytes) -> str:
    """What a file is that is no trace, in words."""
    for magic, said in ((b"PAR1", "a Parquet file"), (b"PK\x03\x04", "a ZIP archive"), (b"[", "a JSON array")):
        if head.lstrip().startswith(magic):
            return said
    first = head.decode("utf-8", errors="replace").lstrip("\ufeff").strip().partition("\n")[0]
    return f"a file that begins with {first[:60]!r}" if first else "empty"
