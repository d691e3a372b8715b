"""What a grammar costs: reading the vocabulary, compiling, and one mask per token. No network runs.

python bench/grammar_masks.py [MODEL ...]        tiny and smollm2 if none is named
"""

from __future__ import annotations

import sys
import time
from random import Random

import numpy as np

from tripool.checkpoints import open_checkpoint
from tripool.core import Structure
from tripool.grammar import GrammarCompiler
from tripool.grammar.tools import tool_structure
from tripool.text import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "about": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "about"],
    "additionalProperties": False,
}
STRUCTURES = {
    "json_object": Structure("json_object"),
    "json_schema": Structure("json_schema", PERSON),
    "regex": Structure("regex", r"[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12}){0,3}, \d{1,3}"),
    "choice of 500": Structure("choice", [f"choice number {number * 7919}" for number in range(500)]),
    "ebnf": Structure("ebnf", 'root ::= term ([-+*] term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "tools, auto": tool_structure([{"name": "find", "parameters": PERSON}], required=False),
}
ANSWERS = 20
MAX_TOKENS = 100


def measure(model: str) -> None:
    with open_checkpoint(model) as checkpoint:
        text = checkpoint.text
    num_ids = Tokenizer(text).vocab_size
    compiler = GrammarCompiler(text, num_ids)
    started = time.perf_counter()
    compiler.guide(Structure("choice", ["warm"]), text.end_ids)
    print(f"{model}: {num_ids} tokens, vocabulary read in {(time.perf_counter() - started) * 1e3:.0f} ms")
    print(f"  {'structure':14} {'compile ms':>10} {'mask µs: median':>16} {'p99':>7} {'largest':>8} {'accept µs':>10}")
    for name, structure in STRUCTURES.items():
        started = time.perf_counter()
        compiler.guide(structure, text.end_ids)
        compile_ms = (time.perf_counter() - started) * 1e3
        masks_us, accepts_us = walk(compiler, structure, text.end_ids)
        print(
            f"  {name:14} {compile_ms:10.1f} {np.median(masks_us):16.1f} {np.percentile(masks_us, 99):7.0f} "
            f"{max(masks_us):8.0f} {np.median(accepts_us):10.1f}"
        )


def walk(compiler: GrammarCompiler, structure: Structure, ends: frozenset[int]) -> tuple[list[float], list[float]]:
    """Random answers; the first mask of each is part of it."""
    masks_us, accepts_us = [], []
    for seed in range(ANSWERS):
        rng, guide = Random(seed), compiler.guide(structure, ends)
        for _ in range(MAX_TOKENS):
            started = time.perf_counter()
            mask = guide.mask()
            masks_us.append((time.perf_counter() - started) * 1e6)
            allowed = mask.nonzero()[0]
            plain = [int(i) for i in rng.sample(list(allowed), min(8, len(allowed))) if i not in ends]
            if not plain:
                break
            started = time.perf_counter()
            guide.accept(plain[0])
            accepts_us.append((time.perf_counter() - started) * 1e6)
    return masks_us, accepts_us


if __name__ == "__main__":
    for name in sys.argv[1:] or ("tiny", "smollm2"):
        measure(name)
