"""Host time of one decode step of a large batch, part by part, with an executor that computes nothing.

    python bench/engine_host.py [--sequences 512] [--steps 400]

Times are medians over the steps. Below them the floors: what it takes to make nothing but the objects of a schedule (a
task for each sequence) and of a settlement (an event for each sequence). To compare two trees, let them take turns:

    for i in 1 2 3; do for tree in ../before .; do PYTHONPATH=$tree/src python bench/engine_host.py; done; done
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tripool.config import SchedulerConfig
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.overlapped import OverlappedEngine
from tripool.engine.paged import Paged
from tripool.engine.scheduler import Scheduler
from tripool.sequence import Sampled, Task
from tripool.text.files import TextFiles

PROMPT_TOKENS, BLOCKS_EACH = 256, 24
PARTS = ("scheduler.schedule", "scheduler.advance", "settle_each", "scheduler.timed", "step")


@dataclass
class Computed:
    tasks: Sequence[Task]

    def tokens(self) -> list[Sampled]:
        return [Sampled(7) for _ in self.tasks]


class Instant:
    """An executor whose device takes no time."""

    def submit(self, tasks: Sequence[Task]) -> Computed:
        return Computed(tasks)

    submit_ahead = submit


class HostEngine(OverlappedEngine):
    def __init__(self, count: int) -> None:
        config = SchedulerConfig(
            num_blocks=count * BLOCKS_EACH, max_running=count, step_tokens=2 * count * PROMPT_TOKENS
        )
        scheduler = Scheduler(config, model="none", context_tokens=BLOCKS_EACH * config.block_tokens)
        Paged.__init__(self, scheduler, TextFiles(tokenizer_json=""), name="none", vocab=1000, max_running=count)
        self.executor: Any = Instant()
        self._running = self._pending = self.draft_switch = self._device_spec = None
        self._drafts = False

    def check(self, request: Request) -> None:
        pass


def timed(times: list[float], do: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began_s = time.perf_counter()
        result = do(*args)
        times.append(time.perf_counter() - began_s)
        return result

    return call


def median_ms(times: Sequence[float]) -> float:
    return 1e3 * median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    asked = parser.parse_args()
    engine = HostEngine(asked.sequences)
    params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    for i in range(asked.sequences):
        prompt = tuple((i * 31 + j) % 997 for j in range(PROMPT_TOKENS))
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=i))
    for _ in range(8):
        engine.step()
    parts: dict[str, list[float]] = {}
    for path in PARTS:
        owner: Any = engine.scheduler if path.startswith("scheduler.") else engine
        name = path.removeprefix("scheduler.")
        setattr(owner, name, timed(parts.setdefault(name, []), getattr(owner, name)))
    for _ in range(asked.steps):
        engine.step()
    for name, times in parts.items():
        print(f"{name:12} {median_ms(times):6.3f} ms")
    both = median_ms(parts["schedule"]) + median_ms(parts["settle_each"])
    print(f"schedule + settle {both:.3f} ms for {asked.sequences} sequences")
    seqs, floors = engine.scheduler.decode.running, ([], [])
    for seq in seqs:
        seq.num_computed = len(seq.tokens) - 1
    for _ in range(asked.steps):
        timed(floors[0], lambda: [Task(seq, seq.work(1)) for seq in seqs])()
        timed(floors[1], lambda: [TokenEvent(seq.request.id, seq.choice, 5, 7, None, None, 0, 0, 0) for seq in seqs])()
    print(f"floors: tasks {median_ms(floors[0]):.3f} ms, events {median_ms(floors[1]):.3f} ms")


if __name__ == "__main__":
    main()
