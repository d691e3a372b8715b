"""Tokenizer, chat template and incremental detokenizer. Independent of tensors and engines."""

from tripool.text.detokenizer import Detokenizer
from tripool.text.files import TextFiles
from tripool.text.stops import StopFinder
from tripool.text.template import NotQuick
from tripool.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "NotQuick", "StopFinder", "TextFiles", "Tokenizer"]
