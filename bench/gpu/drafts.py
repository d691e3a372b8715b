"""Decode rate of the bundled model on a GPU: drafts in every step, in none (steps overlap), and where they pay.

    python3 bench/gpu/drafts.py [--json FILE] [--commit ID] [--toy]

A row compares the rate with the draft switch to the better of the two others, for the same answers. The rate is that of
the tokens in the middle of the answers, where all sequences decode and the switch has tried both kinds of steps.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

TOY = "--toy" in sys.argv

import timing  # noqa: E402
import torch  # noqa: E402
from timing import Row  # noqa: E402

from tripool.config import EngineConfig  # noqa: E402
from tripool.core import Request, SamplingParams  # noqa: E402
from tripool.decode import DraftSwitch  # noqa: E402
from tripool.engine.device import DeviceSpec, cuda_spec, load_on  # noqa: E402
from tripool.engine.overlapped import OverlappedEngine  # noqa: E402
from tripool.text import Tokenizer  # noqa: E402

COUNTS = (1, 3) if TOY else (1, 8, 64, 256)
BEGIN, END = (4, 8) if TOY else (160, 400)
"""Of the measured stretch, in tokens per answer."""
ASKED = (
    "Tell me a story about a fox named Mira.",
    "Write a short story about a robot called Otto.",
    "Tell me a story about a bear and a small bird.",
    "Write a story about Clara, a shy baker who finds a golden key.",
)
KEPT = 0.97
"""Of the better kind's rate, with the switch: it tries the other one now and then."""


class Always:
    """In the place of a draft switch."""

    def __init__(self, drafts: bool) -> None:
        self._drafts = drafts

    def choose(self, num_seqs: int) -> bool:
        return self._drafts

    def measured(self, num_seqs: int, num_tokens: int, step_s: float) -> None:
        pass


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    accepted: float
    """Share of the drafts."""


def measure(engine: OverlappedEngine, prompts: list[list[int]], switch: Always | DraftSwitch) -> Measured:
    engine.draft_switch = switch  # type: ignore[assignment]
    params = SamplingParams(temperature=0.7, max_tokens=END + BEGIN // 2, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_ids=tuple(prompt), params=params, seed=i))
    scheduler, num_tokens = engine.scheduler, 0
    began = last = (0, 0.0)
    drafted, accepted = scheduler.num_drafted, scheduler.num_accepted
    while engine.busy:
        num_tokens += len(engine.step())
        now = (num_tokens, time.perf_counter())
        began = now if num_tokens <= BEGIN * len(prompts) else began
        last = now if num_tokens <= END * len(prompts) else last
    drafted, accepted = scheduler.num_drafted - drafted, scheduler.num_accepted - accepted
    return Measured((last[0] - began[0]) / (last[1] - began[1]), accepted / max(1, drafted))


def rows() -> list[Row]:
    spec = DeviceSpec(torch.device("cpu"), torch.float32) if TOY else cuda_spec("int8")
    name, text, model = load_on(spec, "tiny")
    config = EngineConfig(max_running=max(COUNTS), step_tokens=512, kv_gb=0.05 if TOY else 1.0)
    engine = OverlappedEngine(name, model, text, config, spec)
    if not TOY:
        engine.warm()
    tokenizer, found = Tokenizer(text), []
    asked = [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in ASKED]
    for count in COUNTS:
        prompts = [asked[i % len(asked)] for i in range(count)]
        measure(engine, prompts, Always(True))  # captures what occurs first now
        always, never, switched = (measure(engine, prompts, s) for s in (Always(True), Always(False), DraftSwitch()))
        best = max(always.tokens_per_s, never.tokens_per_s)
        note = f"always {always.tokens_per_s:,.0f}, never {never.tokens_per_s:,.0f}, accepted {always.accepted:.0%}"
        details = {"always": always.tokens_per_s, "never": never.tokens_per_s, "accepted": always.accepted}
        found.append(
            Row(
                name=f"{count} sequences, drafts where they pay / the better of always and never",
                ours=switched.tokens_per_s,
                peer=best,
                unit="tok/s",
                target=KEPT,
                note=note,
                details=details,
            )
        )
    return found


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--toy", action="store_true", help="on a CPU, few tokens")
    asked = parser.parse_args()
    began_s = time.monotonic()
    measured = rows()
    origin = timing.Origin("a toy on a CPU", "none") if TOY else timing.gpu_origin(asked.commit)
    timing.print_rows(measured, origin)
    print(f"{time.monotonic() - began_s:.0f} s")
    if asked.json:
        timing.write_json(measured, origin, asked.json)
    return int(not TOY and any(row.ok is False for row in measured))


if __name__ == "__main__":
    sys.exit(main())
