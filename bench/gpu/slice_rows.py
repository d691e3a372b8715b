"""What `rank_slice.py` found, as rows: with the exchange added or beside, as rates, next to the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timing

ACCEPTED = 0.7
INT8_TOPS = 1979.0
"""Dense INT8 peak of an H200 by its data sheet; the published rates per TFLOPS divide by an NPU's 1,504."""
PUBLISHED = {  # (batch, KV): tok/s per NPU and ms per token, arXiv 2506.12708
    (128, 1024): (2733, 46.8), (112, 2048): (2360, 47.5), (96, 4096): (1943, 49.4), (24, 4096): (974, 24.6),
    (8, 4096): (538, 14.9),
}  # fmt: skip


def tokens_per_s(batch: int, iteration_ms: float) -> float:
    return batch * (1 + ACCEPTED) / iteration_ms * 1e3


def decode_rows(told: Sequence[dict[str, Any]]) -> list[timing.Row]:
    rows = []
    for t in told:
        name = f"EP{t['ranks']} batch {t['batch']} KV {t['kv']} {t['router']}"
        bar = 70.0 if (t["ranks"], t["batch"], t["kv"], t["router"]) == (128, 128, 4096, "balanced") else None
        rows.append(
            timing.Row(
                name=f"decode {name}: compute",
                ours=t["compute_ms"],
                peer=bar or t["floor_ms"],
                unit="ms",
                target=1.0 if bar else None,
                lower_is_better=True,
                details=t,
                note=f"floor {t['floor_ms']:.1f} ms" + ("; 70 ms is the bar" if bar else ""),
            )
        )
        if (t["batch"], t["kv"]) in PUBLISHED and t["router"] == "balanced":
            rows += rate_rows(name, t, PUBLISHED[t["batch"], t["kv"]][0])
    return rows + slo_rows(told)


def rate_rows(name: str, t: dict[str, Any], published: float) -> list[timing.Row]:
    """With the exchange, beside the published rate of the same batch and context."""
    rows = []
    for table in ("deepep", "cloudmatrix"):
        for how in ("serial", "overlapped"):
            iteration = t[f"{table}_{how}_ms"]
            if iteration is None:
                continue
            rate = tokens_per_s(t["batch"], iteration)
            note = (
                f"TPOT {iteration / (1 + ACCEPTED):.1f} ms, {rate / INT8_TOPS:.2f} tok/s per TFLOPS; "
                f"published {published / 1504:.2f}"
            )
            if how == "serial" and t[f"{table}_serial_bound_ms"] > iteration:
                note += f"; TPOT {t[f'{table}_serial_bound_ms'] / (1 + ACCEPTED):.1f} ms if few tokens cost as 128 do"
            rows.append(
                timing.Row(
                    name=f"decode {name}: {how}, {table} exchange",
                    ours=rate,
                    peer=published,
                    unit="tok/s",
                    target=None,
                    note=note,
                )
            )
    return rows


def slo_rows(told: Sequence[dict[str, Any]]) -> list[timing.Row]:
    """Of the measured batches at KV 4,096, the best that keeps each promise."""
    rows = []
    for tpot_ms, published in ((50, 1943.0), (30, 974.0), (15, 538.0)):
        for table in ("deepep", "cloudmatrix"):
            for how in ("serial", "overlapped"):
                fit = [
                    (tokens_per_s(t["batch"], ms), t["batch"], t["ranks"], ms)
                    for t in told
                    if t["kv"] == 4096 and t["router"] == "balanced" and (ms := t[f"{table}_{how}_ms"]) is not None
                    and ms <= tpot_ms * (1 + ACCEPTED)
                ]  # fmt: skip
                best = max(fit, default=None)
                note = "no measured batch keeps it" if best is None else (
                    f"batch {best[1]}, EP{best[2]}, TPOT {best[3] / (1 + ACCEPTED):.1f} ms, "
                    f"{best[0] / INT8_TOPS:.2f} tok/s per TFLOPS (published {published / 1504:.2f})"
                )  # fmt: skip
                rows.append(
                    timing.Row(
                        name=f"decode, TPOT {tpot_ms} ms: {how}, {table} exchange",
                        ours=best[0] if best else 0.0,
                        peer=published,
                        unit="tok/s",
                        target=None,
                        note=note,
                    )
                )
    return rows


def print_operators(title: str, operators: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}: µs per layer, floor, times, ms over the floor in all")
    for one in sorted(operators, key=lambda o: -o["over_floor_ms"]):
        print(f"  {one['op']:<34}{one['us']:>9.1f}{one['floor_us']:>9.1f}{one['times']:>5}{one['over_floor_ms']:>9.2f}")
