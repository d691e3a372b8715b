"""What a run tells: a JSON line per step, a printed line now and then, and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tripool.page import Plot
from tripool.page.html import STYLE

FILE, PLOT = "metrics.jsonl", "loss.svg"
_MOST_POINTS = 400


class Metrics:
    """Lines of steps that a resumed run does again are cut away first."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / FILE
        kept = [line for line in read_metrics(folder) if line["step"] <= step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")

    def put(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut by a kill."""
    path = folder / FILE
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def loss_plot(lines: Sequence[Mapping[str, Any]]) -> str:
    """Loss of the next token and, lighter, of the one after it; held-out losses as points. One SVG file."""
    steps = [line for line in lines if "loss" in line]
    held = [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]
    last = max((line["step"] for line in lines), default=1)
    highest = max([line[key] for line in steps for key in ("loss", "mtp_loss")], default=1.0)
    plot = Plot("loss by step", "step", last, highest, "nats per token; points: held out", height=320)
    for key, kind in (("mtp_loss", "two"), ("loss", "one")):
        plot.line(_thinned(steps, key), kind)
    plot.points([(step, loss, f"step {step}: {loss:.3f} held out") for step, loss in held], "three")
    drawn = plot.render()
    inner = drawn[drawn.index("<svg") : drawn.index("</svg>") + len("</svg>")]
    tag, _, rest = inner.partition(">")
    style = f"<style>{STYLE.replace('body{', '.unused{')}svg{{background:var(--back)}}</style>"
    return f'{tag} xmlns="http://www.w3.org/2000/svg">{style}{rest}\n'


def _thinned(lines: Sequence[Mapping[str, Any]], key: str) -> Iterable[tuple[float, float]]:
    """At most so many points, each the mean of its neighbours."""
    stride = max(1, -(-len(lines) // _MOST_POINTS))
    for start in range(0, len(lines), stride):
        some = lines[start : start + stride]
        yield sum(line["step"] for line in some) / len(some), sum(line[key] for line in some) / len(some)


def said(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
