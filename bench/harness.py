"""What every benchmark here shares: worker processes, taking turns, rows with machine and commit, table and JSON.

Knows nothing of models or engines. A measurement is a function that returns one number; who is compared with whom, over
which work, is the benchmark's own affair.
"""

from __future__ import annotations

import json
import os
import platform
import select
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
TOLD_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "sve",
)
IDLE_WITHIN_S = 5.0
CLOSE_WITHIN_S = 10.0


class WorkerFailed(Exception):
    """A worker is missing, died, was too slow, or said why it cannot; the message is fit for a row's note."""


class Worker:
    """A program in its own process that answers one JSON line per JSON line. Its stderr goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        self._pending = b""

    def ask(self, *, within_s: float, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        reply: dict[str, Any] = json.loads(self._read_line(time.monotonic() + within_s))
        if "error" in reply:
            raise WorkerFailed(str(reply["error"]))
        return reply

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_idle(self) -> None:
        """Return once the process burns no CPU: a worker that spins while waiting would slow down whoever is next."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():  # not Linux: nothing to look at
            return
        deadline = time.monotonic() + IDLE_WITHIN_S
        before = _cpu_ticks(stat)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = _cpu_ticks(stat)
            if now - before <= 1:
                return
            before = now
        raise WorkerFailed(f"still burning CPU {IDLE_WITHIN_S:g} s after its work")

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(CLOSE_WITHIN_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise WorkerFailed("did not answer in time")
            chunk = os.read(output, 1 << 20)
            if not chunk:
                raise WorkerFailed(self._last_words())
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"died: {lines[-1][:200]}" if lines else "died without a word"


def _cpu_ticks(stat: Path) -> int:
    # The second field, the program's name in parentheses, may itself hold spaces.
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@dataclass
class Measured:
    """What came of taking turns: each side's samples, and the reason for each side that has none."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, side: str) -> float | None:
        return statistics.median(self.samples[side]) if side in self.samples else None


def take_turns(sides: Mapping[str, Callable[[int], float]], repetitions: int) -> Measured:
    """Each side measures once per repetition, in an order that turns round: drift of the machine favours nobody."""
    measured = Measured()
    for repetition in range(repetitions):
        order = list(sides) if repetition % 2 == 0 else list(sides)[::-1]
        for side in order:
            if side in measured.failed:
                continue
            try:
                measured.samples.setdefault(side, []).append(sides[side](repetition))
            except WorkerFailed as failure:
                measured.failed[side] = str(failure)
                del measured.samples[side]
    return measured


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `ours` or `peer` is None when that side could not be measured; then the row has failed."""

    name: str
    ours: float | None
    peer: float | None
    unit: str
    target: float | None
    """Bound of ours / peer; None: told for information."""
    lower_is_better: bool = False
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: {_number(self.ours)} / {_number(self.peer)} {self.unit} = {_number(self.ratio)}"

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.peer is None else self.ours / self.peer

    @property
    def ok(self) -> bool | None:
        """None: measured, but nothing was promised."""
        if self.ratio is None:
            return False
        if self.target is None:
            return None
        return self.ratio <= self.target if self.lower_is_better else self.ratio >= self.target


@dataclass(frozen=True)
class Origin:
    """Where and of what the numbers are. Taken before measuring, so that `load` tells of others, not of ourselves."""

    machine: str
    commit: str

    @classmethod
    def now(cls) -> Origin:
        return cls(machine(), commit())


def write_json(rows: Sequence[Row], origin: Origin, file: Path) -> None:
    entries = [asdict(row) | {"ratio": row.ratio, "ok": row.ok} | asdict(origin) for row in rows]
    file.write_text(json.dumps(entries, indent=1) + "\n")


def print_table(rows: Sequence[Row], origin: Origin, title: str) -> None:
    from rich.console import Console  # here: rows are also made on machines that have torch and little else
    from rich.table import Table

    caption = f"{origin.machine} · {origin.commit}"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for heading in ("", "row", "ours", "peer", "unit", "ratio", "target"):
        table.add_column(heading, justify="right" if heading in ("ours", "peer", "ratio", "target") else "left")
    table.add_column("note", overflow="fold")
    for row in rows:
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[row.ok]
        sense = "≤" if row.lower_is_better else "≥"
        target = "" if row.target is None else f"{sense} {row.target:g}"
        table.add_row(
            mark, row.name, _number(row.ours), _number(row.peer), row.unit, _number(row.ratio), target, row.note
        )
    # Not a terminal means a log or a note: wide enough that no row wraps.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def machine() -> str:
    """Processor, cores, memory, the instruction sets that decide speed, and how busy the machine was."""
    cpu, flags = platform.processor() or platform.machine(), ""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        said = dict(line.split(":", 1) for line in cpu_info.read_text().splitlines() if ":" in line)
        facts = {key.strip(): value.strip() for key, value in said.items()}
        cpu = facts.get("model name", cpu)
        present = set((facts.get("flags") or facts.get("Features") or "").split())
        flags = " ".join(flag for flag in TOLD_CPU_FLAGS if flag in present)
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{cpu}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {flags or 'flags unknown'}, load {load:.1f}"


def commit() -> str:
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        told = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git there
        return "uncommitted"
    return told.stdout.strip() if told.returncode == 0 else "uncommitted"
