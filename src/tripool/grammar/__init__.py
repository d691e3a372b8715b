"""Structured output: computes which tokens may follow so that an answer has its structure. Over llguidance; no tensors.

A `Structure` is translated into llguidance's grammar, checked in a sandbox (`Trial`, for untrusted callers), compiled
once per model (`GrammarCompiler`), and followed by one `Guide` per answer. Independent of sampling and scheduling.
"""

from tripool.grammar.compiler import GrammarCompiler
from tripool.grammar.guide import Guide
from tripool.grammar.trial import Trial

__all__ = ["GrammarCompiler", "Guide", "Trial"]
