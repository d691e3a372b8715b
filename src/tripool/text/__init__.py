"""Text in, tokens out, and back: tokenizer, chat template, incremental detokenizer. Knows no tensor or engine."""

from tripool.text.detokenizer import Detokenizer
from tripool.text.files import TextFiles
from tripool.text.stops import StopFinder
from tripool.text.template import NotQuick
from tripool.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "NotQuick", "StopFinder", "TextFiles", "Tokenizer"]
