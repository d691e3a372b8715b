"""Which tokens may come next so that an answer has the structure its caller asked for. Over llguidance; no tensors.

A `Structure` is translated into llguidance's own grammar, tried (`Trial`, where callers are strangers), compiled once
per model (`GrammarCompiler`), and followed by one `Guide` per answer. Knows neither sampling nor scheduling.
"""

from tripool.grammar.compiler import GrammarCompiler
from tripool.grammar.guide import Guide
from tripool.grammar.trial import Trial

__all__ = ["GrammarCompiler", "Guide", "Trial"]
