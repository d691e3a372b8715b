"""Where the time of our engine's decode steps goes: kernels, idle time of the device, and parts of the host's work.

A batch decodes three stretches of steps: undisturbed with timers around the engine's parts, under torch's profiler, and
under Python's. The device's idle share is one minus its busy time per step (second stretch) over the wall time per step
(first stretch), because the profiler slows the host down.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from beside_load import ANSWER_TOKENS, PROMPT_TOKENS, Report, batch_prompts

from tripool.engine.engine import Engine

if TYPE_CHECKING:
    from beside_ours import OurSide

NUM_KERNELS, NUM_FUNCTIONS = 40, 30
LONG_GAP_US = 10.0
"""Gaps between two kernels of one graph are shorter: longer ones are the host's."""
PARTS = {
    "schedule": "scheduler.schedule",
    "submit": "executor.submit_ahead",
    "choices": "executor.sampler.submit",
    "fill": "executor.runner.step_logits",
    "settle": "settle_each",
    "draft": "draft",
}
"""Methods of the engine whose time is told, by their path. `fill` and `choices` are parts of `submit`, whose rest is
the wait for the device. A path that does not exist any more is told as missing."""
WAITS = ("Synchronize", "cudaMemcpyAsync")
"""Calls of the CUDA runtime in which the host waits."""


class Timers:
    """Adds up the time spent in methods of one object. Wraps them on that object only."""

    def __init__(self, root: object, paths: dict[str, str]) -> None:
        self.spent_s: dict[str, float] = dict.fromkeys(paths, 0.0)
        self.missing: list[str] = []
        self._wrapped: list[tuple[Any, str]] = []
        for label, path in paths.items():
            owner: Any = root
            *names, method = path.split(".")
            for name in names:
                owner = getattr(owner, name, None)
            try:
                setattr(owner, method, self._timed(label, getattr(owner, method)))
            except AttributeError:  # it has another name now, or its owner has slots
                self.missing.append(path)
                continue
            self._wrapped.append((owner, method))

    def _timed(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                self.spent_s[label] += time.perf_counter() - began_s

        return timed

    def remove(self) -> None:
        for owner, method in self._wrapped:
            delattr(owner, method)


def profile_rows(side: OurSide, batches: Sequence[int], step_tokens: int, file: Path, report: Report) -> None:
    """One row for each batch size; the lists of kernels and functions go to the file."""
    profiles = []
    for sequences in batches:
        engine = side.engine(sequences, PROMPT_TOKENS + ANSWER_TOKENS, step_tokens)
        profile = _profile(engine, side.vocab, sequences, small=side.small)
        profiles.append(profile)
        file.write_text(json.dumps(profiles, indent=1) + "\n")
        report.add({name: value for name, value in profile.items() if name not in ("kernels", "functions")})
        for kernel in profile["kernels"][:12]:
            print(f"  {kernel['us']:9.1f} µs {kernel['share']:6.1%} {kernel['count']:7.1f} x {kernel['name'][:90]}")
        del engine
        gc.collect()  # captured steps refer to their runner: without it their memory stays
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _profile(engine: Engine, vocab: int, sequences: int, *, small: bool) -> dict[str, Any]:
    from beside_ours import cancel_all, request_of

    prompt_len, count, steps = (16, 40, 8) if small else (PROMPT_TOKENS, ANSWER_TOKENS, 48)
    names = [str(i) for i in range(sequences)]
    for name, prompt in zip(names, batch_prompts(vocab, sequences, prompt_len), strict=True):
        engine.add(request_of(name, prompt, count))
    unanswered = set(names)
    while unanswered:
        unanswered -= {event.request_id for event in engine.step()}
    for _ in range(4):  # captures what decode steps need
        engine.step()

    timers = Timers(engine, PARTS)
    wall_ms = _steps_ms(engine, steps)
    timers.remove()
    host_ms = {label: spent_s / steps * 1e3 for label, spent_s in timers.spent_s.items()}
    events = _trace(engine, steps)
    functions = _functions(engine, steps)
    cancel_all(engine, names)

    cuda = torch.cuda.is_available()
    on_device = [e for e in events if e.get("cat") in (("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",))]
    busy_ms, idle_share, long_gap_share = _busy(on_device, steps)
    waits = [e for e in events if e.get("cat") == "cuda_runtime" and any(part in e["name"] for part in WAITS)]
    return {
        "work": f"profile x{sequences}", "sequences": sequences, "steps": steps, "wall_ms": wall_ms,
        "busy_ms": busy_ms, "idle_share": max(0.0, 1 - busy_ms / wall_ms), "traced_idle_share": idle_share,
        "traced_long_gap_share": long_gap_share, "traced_wait_ms": sum(e["dur"] for e in waits) / steps / 1e3,
        "schedule_and_settle_ms": host_ms["schedule"] + host_ms["settle"],
        "host_ms": host_ms, "missing_parts": timers.missing,
        "kernels": _by_kernel(on_device, steps), "functions": functions,
    }  # fmt: skip


def _steps_ms(engine: Engine, steps: int) -> float:
    began_s = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - began_s) / steps * 1e3


def _trace(engine: Engine, steps: int) -> list[dict[str, Any]]:
    """Complete events of torch's profiler: name, category, start and duration in µs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        _steps_ms(engine, steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _functions(engine: Engine, steps: int) -> list[dict[str, Any]]:
    """The host's functions by their own time per step, which Python's profiler makes longer than it is."""
    profiler = cProfile.Profile()
    profiler.runcall(_steps_ms, engine, steps)
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [
        {"name": f"{Path(file).name}:{line} {name}", "calls": calls / steps, "own_ms": own_s / steps * 1e3,
         "whole_ms": whole_s / steps * 1e3}
        for (file, line, name), (_, calls, own_s, whole_s, _) in stats.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["own_ms"])[:NUM_FUNCTIONS]


def _busy(events: Sequence[dict[str, Any]], steps: int) -> tuple[float, float, float]:
    """Milliseconds per step in which at least one event runs; share of the stretch in gaps, and in long gaps."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    if not spans:
        return 0.0, 1.0, 1.0
    first_us, until_us = spans[0][0], spans[0][0]
    gaps_us = []
    for start_us, stop_us in spans:
        if start_us > until_us:
            gaps_us.append(start_us - until_us)
        until_us = max(until_us, stop_us)
    whole_us = max(until_us - first_us, 1e-3)
    long_us = sum(gap for gap in gaps_us if gap > LONG_GAP_US)
    return (whole_us - sum(gaps_us)) / steps / 1e3, sum(gaps_us) / whole_us, long_us / whole_us


def _by_kernel(events: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Per step: launches, µs, and share of the time of all of them."""
    spent_us: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        spent_us[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    whole_us = sum(spent_us.values()) or 1.0
    ranked = sorted(spent_us, key=lambda name: -spent_us[name])[:NUM_KERNELS]
    return [
        {"name": name, "count": counts[name] / steps, "us": spent_us[name] / steps, "share": spent_us[name] / whole_us}
        for name in ranked
    ]
