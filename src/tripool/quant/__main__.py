"""`python -m tripool.quant SRC DST`: same as `tripool quantize`, for machines with little more than torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tripool.checkpoints import open_checkpoint
from tripool.errors import TripoolError
from tripool.quant import Techniques, quantize, read_windows
from tripool.text import Tokenizer

_WINDOW = 512


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tripool.quant", description=__doc__)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="of the built-in calibration text; 0: no data")
    parser.add_argument("--keep", type=float, default=Techniques().keep, help="see `tripool quantize --help`")
    parser.add_argument("--vocabulary", action="store_true", help="round embedding and head too")
    given = parser.parse_args(argv)
    try:
        with open_checkpoint(given.source) as source:
            windows = []
            if given.tokens:
                windows = read_windows(None, Tokenizer(source.text), num_tokens=given.tokens, window=_WINDOW)
            techniques = Techniques(keep=given.keep, vocabulary=given.vocabulary)
            done = quantize(source, given.target, techniques=techniques, windows=windows)
    except TripoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(done.linears)} linears in 8 bits, kept in floats: {', '.join(done.kept) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
