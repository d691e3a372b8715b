"""`python -m tripool.train CONFIG.toml`: what `tripool train` does, on machines that have torch and little else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tripool.errors import TripoolError
from tripool.train.config import read_config


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tripool.train", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or the name of one of ours: tripool-tiny, smoke")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of documents, *.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="state, metrics and the model go here")
    parser.add_argument("--minutes", type=float, help="fit the schedule to this much time, export included")
    parser.add_argument("--resume", action="store_true", help="go on where a run in --out was stopped or killed")
    given = parser.parse_args(argv)
    try:
        config = read_config(given.config)
        from tripool.train.run import train  # torch takes a while: a wrong config should not

        tell = partial(print, flush=True)
        train(config, given.data, given.out, minutes=given.minutes, resume=given.resume, tell=tell)
    except TripoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
