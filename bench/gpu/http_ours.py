"""Our server of `http_beside.py`: `tripool serve` with random weights in place of a checkpoint.

    python3 bench/gpu/http_ours.py SHAPE KIND --port PORT [--max-running 256] [--step-tokens 4096] [--small]

KIND: bf16, fp8 or int8. `--small`: narrow shapes, on a CPU. Without a port, further arguments are those of `tripool`:
so the server starts the process of its engine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from beside_load import Sizes
from beside_ours import MIXED_STEP_TOKENS, STORED, OurSide
from beside_shapes import SHAPES, settings_of, tokenizer_json

from tripool.cli.main import main as tripool
from tripool.config import EngineConfig
from tripool.engine.engine import Engine
from tripool.text.files import TextFiles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=("bf16", *STORED))
    parser.add_argument("--port", help="serve there")
    parser.add_argument("--max-running", type=int, default=Sizes().in_flight)
    parser.add_argument("--step-tokens", type=int, default=MIXED_STEP_TOKENS, help="0: the server's own default")
    parser.add_argument("--small", action="store_true")
    asked, arguments = parser.parse_known_args()
    settings, sizes = settings_of(asked.shape, small=asked.small), Sizes.of(quick=False, small=asked.small)
    text = TextFiles(tokenizer_json=tokenizer_json(settings["vocab_size"]), end_ids=frozenset({1}))

    def load(model: str, config: EngineConfig) -> Engine:
        side = OurSide(settings, asked.kind, small=asked.small)
        step_tokens = asked.step_tokens or config.step_tokens
        engine = side.engine(asked.max_running, sizes.context_tokens, step_tokens, text=text, prefix_reuse=True)
        engine.warm()
        return engine

    own = [asked.shape, asked.kind, "--max-running", asked.max_running, "--step-tokens", asked.step_tokens]
    program = [sys.executable, str(Path(__file__).resolve()), *map(str, own), *["--small"] * asked.small]
    if asked.port:
        options = ["--port", asked.port, "--max-running", str(asked.max_running), "--no-mtp"]
        arguments = ["serve", "random", *options, "--device", "cpu" if asked.small else "cuda"]
    tripool(arguments, load, program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
