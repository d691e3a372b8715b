"""`python -m tiny.drafts MODEL --out RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tripool.errors import TripoolError


def main(argv: Sequence[str] | None = None) -> int:
    description = "Teach a model's MTP layer to foretell the model's own answers; nothing else in it changes."
    parser = argparse.ArgumentParser(prog="python -m tiny.drafts", description=description)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint in floats, as `tripool train` leaves it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="metrics and the model go here")
    parser.add_argument("--minutes", type=float, help="from start to end; without it, --answers and --steps decide")
    parser.add_argument("--answers", type=int, default=512, help="questions that the model is asked (default 512)")
    parser.add_argument("--steps", type=int, default=100, help="steps of learning from the answers (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, answers and order")
    given = parser.parse_args(argv)
    try:
        from tiny.drafts.learn import Amount, learn_drafts  # torch takes a while: wrong options should not

        amount = Amount(minutes=given.minutes, answers=given.answers, steps=given.steps)
        learn_drafts(given.model, given.out, amount, seed=given.seed, tell=partial(print, flush=True))
    except TripoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; there is no model", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
