"""`tripool quantize`: converts a checkpoint to INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.terminal import progress, stderr

_SOURCE = "A name that `tripool models` shows, or the path of a checkpoint: BF16, FP32 or FP8 with block scales."
_WINDOW = 512
_WORST_SHOWN = 12


def register(app: typer.Typer) -> None:
    @app.command()
    def quantize(
        source: Annotated[str, typer.Argument(metavar="SRC", help=_SOURCE)],
        target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder; or one that was begun and killed.")],
        calibration: Annotated[
            Path | None, typer.Option(help="Text like what the model will read; a small one is built in.")
        ] = None,
        tokens: Annotated[int, typer.Option(min=0, help="Calibration tokens; 0: without data.")] = 4096,
        suppress: Annotated[bool, typer.Option(help="Scale outliers out of activations and into weights.")] = True,
        search: Annotated[bool, typer.Option(help="Search each channel's clipping by output error.")] = True,
        compensate: Annotated[bool, typer.Option(help="Feed a column's rounding error to the next ones.")] = True,
        keep: Annotated[float, typer.Option(help="Most growth by parts that stay in floats, as a share.")] = 0.4,
        vocabulary: Annotated[bool, typer.Option(help="Round embedding and head too.")] = False,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores when not given.")] = None,
    ) -> None:
        """Write SRC as an INT8 checkpoint (compressed-tensors W8A8) to DST."""
        import torch

        from tripool.checkpoints import open_checkpoint
        from tripool.quant import Techniques, read_windows
        from tripool.quant import quantize as run
        from tripool.text import Tokenizer

        if threads is not None:
            torch.set_num_threads(threads)
        techniques = Techniques(
            suppress=suppress, search=search, compensate=compensate, keep=keep, vocabulary=vocabulary
        )
        console = stderr()
        with open_checkpoint(source) as checkpoint:
            windows = []
            if tokens:
                tokenizer = Tokenizer(checkpoint.text)
                windows = read_windows(calibration, tokenizer, num_tokens=tokens, window=_WINDOW)
            with progress(checkpoint.name, None, enabled=console.is_terminal) as update:

                def report(done: int, total: int, what: str) -> None:
                    update(completed=done, total=total, description=what)
                    if not console.is_terminal:  # a log: one line each, to show progress
                        console.print(f"{done} of {total}: {what}", soft_wrap=True)

                done = run(checkpoint, target, techniques=techniques, windows=windows, on_progress=report)
        if done.resumed:
            console.print(f"resumed after {done.resumed} finished shards")
        _print(done.linears)
        console.print(f"kept in floats: {', '.join(done.kept) or 'nothing'}", soft_wrap=True)


def _print(linears: list[dict[str, Any]]) -> None:
    """By kind of linear, then the worst of all."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in linears:
        kinds.setdefault(".".join(part for part in one["name"].split(".")[3:] if not part.isdecimal()), []).append(one)
    table = Table(title="relative errors")
    for heading in ("linear", "count", "weights", "output", "worst output", "clip", "in floats"):
        table.add_column(heading, justify="left" if heading == "linear" else "right")
    for kind, some in kinds.items():
        table.add_row(kind, str(len(some)), *_means(some), str(sum(one["kept"] for one in some)))
    worst = sorted(linears, key=lambda one: -one["output_error"])[:_WORST_SHOWN]
    table.add_section()
    for one in worst:
        table.add_row(one["name"], "1", *_means([one]), str(int(one["kept"])))
    console = Console()  # not a terminal means a log: wide enough that no row wraps
    (console if console.is_terminal else Console(width=160)).print(table)


def _means(some: list[dict[str, Any]]) -> tuple[str, str, str, str]:
    weight, output, clip = (sum(one[key] for one in some) / len(some) for key in _ERRORS)
    worst = max(one["output_error"] for one in some)
    return f"{weight:.3%}", f"{output:.3%}", f"{worst:.3%}", f"{clip:.3f}"


_ERRORS = ("weight_error", "output_error", "mean_clip")
