"""Our serving engine and vLLM in one stretch on one GPU: throughput, first tokens, and latencies under mixed load.

    python3 bench/gpu/vllm_beside.py [STAGE ...] [--ours] [--quick] [--json FILE] [--carried FOLDER] [--out FOLDER]

STAGE is SIDE:SHAPE:KIND:WORK[:SECONDS], such as `vllm:lite:bf16:1,8,64,256` or `ours:lite:int8:64+profile:120`.
SIDE: vllm or ours. SHAPE: lite, llama or qwen (see `beside_shapes.py`). KIND: bf16, fp8, or int8 (ours only, compared
with vLLM's fp8). WORK: batch sizes, `mixed`, `profile` (ours only). Without stages: all of them, for about an hour.

Batches: 256 tokens in, 256 out, greedy. Mixed: Poisson arrivals at 60, 80 and 95 % of vLLM's closed-loop rate.
Rows are kept in `--folder`. With `--ours` only our stages run and vLLM's rows are those kept there; such a row says
how old they are and whether the machine was started since. A row without one of its sides has failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timing
from beside_load import LOADS, PROFILED
from beside_shapes import TITLES
from beside_stages import Key, Place, Stage, Store, boot_id, copy_results, run_stage
from timing import REPO, Origin, Row

PEER_KIND = {"bf16": "bf16", "fp8": "fp8", "int8": "fp8"}
BATCHES = "1,8,64,256"
KINDS = {"lite": ("bf16", "fp8", "int8"), "llama": ("bf16",), "qwen": ("bf16",)}
MIXED = ("lite", "bf16")
IDLE_SHARE, HOST_MS, HOST_SEQUENCES = 0.03, 2.0, 512
"""Bounds of our own: the device's idle share of decode steps, and schedule plus settle of a large batch."""
STRETCH_S = 3600.0
LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


def all_stages() -> list[Stage]:
    texts = []
    for shape, kinds in KINDS.items():
        texts += [f"vllm:{shape}:{kind}:{BATCHES}" for kind in kinds if kind != "int8"]
        texts += [f"ours:{shape}:{kind}:{BATCHES}+profile" for kind in kinds]
    texts += [f"{side}:{':'.join(MIXED)}:mixed" for side in ("vllm", "ours")]
    return [Stage.of(text) for text in texts]


class Table:
    """Rows of both sides, compared."""

    def __init__(self, store: Store, asked: Iterable[Stage], began_s: float) -> None:
        """`began_s`: rows measured before were kept from an earlier call."""
        self._rows, self._began_s = store.rows, began_s
        ours = [key[1:] for key in store.rows if key[0] == "ours"]
        ours += [(stage.shape, stage.kind, work) for stage in asked if stage.side == "ours" for work in _works(stage)]
        self._asked = sorted(set(ours), key=_order)

    def rows(self) -> list[Row]:
        return [row for shape, kind, work in self._asked for row in self._rows_of(shape, kind, work)]

    def _rows_of(self, shape: str, kind: str, work: str) -> list[Row]:
        ours = self._rows.get(("ours", shape, kind, work))
        peer = self._rows.get(("vllm", shape, PEER_KIND[kind], work))
        title = f"{TITLES[shape]} {kind}" + ("" if kind == PEER_KIND[kind] else f" / {PEER_KIND[kind]}")
        if work.startswith("profile"):
            return self._profile_rows(title, work, ours)
        common = {"note": self._note(ours, peer), "details": self._details(ours, peer)}
        if work.startswith("load"):
            return [
                Row(
                    name=f"{title}, {work}, {name.removesuffix('_ms').replace('_', ' ').upper()}",
                    ours=(ours or {}).get(name), peer=(peer or {}).get(name), unit="ms", target=1.0,
                    lower_is_better=True, **common,
                )
                for name in LATENCIES
            ]  # fmt: skip
        if work == "closed":
            return [_row(f"{title}, closed loop", ours, peer, "rate", "requests/s", None, **common)]
        goal = 1.05 if (shape, work) == ("lite", "x256") and kind != "bf16" else 1.0
        return [
            _row(f"{title}, {work}", ours, peer, "tok_s", "tok/s", goal, **common),
            _row(
                f"{title}, {work}, first token", ours, peer, "first_ms", "ms", 1.0 if work == "x1" else None,
                lower_is_better=True, **common,
            ),
            _row(f"{title}, {work}, step", ours, peer, "step_ms", "ms", None, lower_is_better=True, **common),
        ]  # fmt: skip

    def _profile_rows(self, title: str, work: str, ours: dict[str, Any] | None) -> list[Row]:
        told = ours or {}
        parts = ", ".join(f"{name} {spent:.2f}" for name, spent in told.get("host_ms", {}).items())
        details = {name: told.get(name) for name in ("wall_ms", "busy_ms", "traced_idle_share", "host_ms", "commit")}
        idle = Row(
            name=f"{title}, {work}: idle share of the device, against its bound", ours=told.get("idle_share"),
            peer=IDLE_SHARE, unit="of a step", target=1.0, lower_is_better=True, note=f"host ms: {parts}",
            details=details,
        )  # fmt: skip
        large = told.get("sequences") == HOST_SEQUENCES
        host = Row(
            name=f"{title}, {work}: schedule + settle, against their bound", ours=told.get("schedule_and_settle_ms"),
            peer=HOST_MS, unit="ms", target=1.0 if large else None, lower_is_better=True, details=details,
        )  # fmt: skip
        return [idle, host]

    def _note(self, ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
        if ours is None or peer is None:
            return f"not measured: {'ours' if ours is None else ''} {'vLLM' if peer is None else ''}".replace("  ", " ")
        notes = []
        for name, row in (("our", ours), ("vLLM's", peer)):
            if not _same_stretch(row, {"boot": boot_id(), "measured_s": time.time()}):
                notes.append(f"{name} row was kept from another stretch")
            elif row["measured_s"] < self._began_s:
                notes.append(f"{name} row was kept from {(time.time() - row['measured_s']) / 60:.0f} minutes before")
            if row.get("agreed") is False:
                notes.append(f"{name} runs differ")
            if row.get("unfinished"):
                notes.append(f"{name} unfinished requests: {row['unfinished']}")
        return "; ".join(notes)

    def _details(self, ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "same_stretch": bool(ours and peer and _same_stretch(ours, peer)),
            "our_commit": (ours or {}).get("commit"),
            "measured_s": {"ours": (ours or {}).get("measured_s"), "vllm": (peer or {}).get("measured_s")},
        }


def _row(
    name: str, ours: dict[str, Any] | None, peer: dict[str, Any] | None, field: str, unit: str, target: float | None,
    *, lower_is_better: bool = False, **more: Any,
) -> Row:  # fmt: skip
    values = [None if side is None else side.get(field) for side in (ours, peer)]
    return Row(
        name=name, ours=values[0], peer=values[1] or None, unit=unit, target=target, lower_is_better=lower_is_better,
        **more,
    )  # fmt: skip


def _same_stretch(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Machines restored from one snapshot may share their boot's id: the time between must be short, too."""
    return bool(row["boot"] == other["boot"] and abs(row["measured_s"] - other["measured_s"]) < STRETCH_S)


def _works(stage: Stage) -> list[str]:
    mixed = ["closed", *(f"load {load:.0%}" for load in LOADS)] if "mixed" in stage.work else []
    profiled = [f"profile x{count}" for count in PROFILED] if "profile" in stage.work else []
    return [f"x{count}" for count in stage.batches] + mixed + profiled


def _order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    shape, kind, work = key
    digits = "".join(filter(str.isdigit, work))
    return list(TITLES).index(shape), list(PEER_KIND).index(kind), work.rstrip("0123456789%"), int(digits or 0)


def _ratios(rows: Iterable[Row]) -> None:
    """A short table last: throughput only."""
    print("\n| tok/s, ours / vLLM | ratio | |\n|---|---|---|")
    for row in rows:
        if row.unit == "tok/s":
            shown = [f"{value:,.0f}" if value is not None else "–" for value in (row.ours, row.peer)]
            ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
            print(f"| {row.name}: {' / '.join(shown)} | {ratio} | {row.note} |")


def peer_rate_of(rows: dict[Key, dict[str, Any]], stage: Stage, *, small: bool) -> float | None:
    row = rows.get(("vllm", stage.shape, PEER_KIND[stage.kind], "closed"))
    return row["rate"] if row else 6.0 if small else None


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("stages", nargs="*", type=Stage.of, metavar="STAGE")
    parser.add_argument("--ours", action="store_true", help="our stages only; vLLM's rows as they were kept")
    parser.add_argument("--small", action="store_true", help="our side with narrow shapes on a CPU")
    parser.add_argument("--folder", type=Path, default=REPO / "build" / "beside", help="keeps rows and logs")
    parser.add_argument("--carried", type=Path, help="has vLLM's archive and packages for our side, to be unpacked")
    parser.add_argument("--peer-rows", type=Path, help="an earlier rows.json: its rows of vLLM count too")
    parser.add_argument("--out", type=Path, help="copy rows, profiles and logs there")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    place = Place(asked.folder.resolve(), asked.carried)
    place.unpack()
    store, began_s = Store(place.rows, asked.peer_rows), time.time()
    stages = [stage for stage in asked.stages or all_stages() if stage.side == "ours" or not asked.ours]
    more = {"ours": ["--quick"] * asked.quick + ["--small"] * asked.small, "vllm": ["--quick"] * asked.quick}
    commit = asked.commit or timing.commit()
    failed = []
    for stage in stages:
        rate = peer_rate_of(store.rows, stage, small=asked.small)
        if not run_stage(stage, place, store, peer_rate=rate, more=more[stage.side], commit=commit):
            failed.append(stage.name)
        if asked.out:
            copy_results(place, asked.out)
    origin = Origin("a trial on a CPU", commit) if asked.small else timing.gpu_origin(commit)
    rows = Table(store, stages, began_s).rows()
    timing.print_rows(rows, origin)
    _ratios(rows)
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
