"""`tripool eval`: how far two checkpoints agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.files import write_file
from tripool.cli.terminal import progress
from tripool.errors import InvalidRequest

Arithmetic = Literal["float32", "int8", "w8a8"]
_HOW = "float32; int8: our 8-bit kernels; w8a8: the layout's integers and rounding per token, in plain torch."


def register(app: typer.Typer) -> None:
    @app.command(name="eval")
    def evaluate(
        a: Annotated[str, typer.Argument(metavar="A", help="The reference checkpoint, such as the original.")],
        b: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with it.")],
        text: Annotated[Path, typer.Option(help="A file of plain text, other than what B was calibrated on.")],
        tokens: Annotated[int, typer.Option(min=2, help="Read at most this much of the text.")] = 8192,
        window: Annotated[int, typer.Option(min=64, help="Tokens read at a time.")] = 512,
        answers: Annotated[int, typer.Option(min=0, help="Greedy answers to compare, one for each window.")] = 16,
        answer_tokens: Annotated[int, typer.Option(min=1, help="Length of a greedy answer.")] = 32,
        precision_a: Annotated[Arithmetic, typer.Option(help=f"How A computes. {_HOW}")] = "float32",
        precision_b: Annotated[Arithmetic, typer.Option(help="How B computes.")] = "int8",
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, too.")] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores when not given.")] = None,
    ) -> None:
        """Compare B with A on a text: perplexity, next-token agreement, KL, greedy agreement."""
        import os

        import torch

        from tripool.checkpoints import open_checkpoint
        from tripool.kernels.cpu8.library import set_threads
        from tripool.quant import Side, compare, read_windows
        from tripool.text import Tokenizer

        threads = threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        if "int8" in (precision_a, precision_b):
            set_threads(threads)
        sides = []
        with open_checkpoint(a) as first:
            windows = read_windows(text, Tokenizer(first.text), num_tokens=tokens, window=window)
            context = max(window, answer_tokens + 64)
        for name, arithmetic in ((a, precision_a), (b, precision_b)):
            with open_checkpoint(name) as checkpoint:
                sides.append(Side(checkpoint, arithmetic, window=context, num_answers=answers))
        if sides[0].vocab != sides[1].vocab:
            problem = f"vocabularies of {sides[0].vocab} and {sides[1].vocab} tokens"
            raise InvalidRequest(problem, hint="give two forms of one model")
        with progress("windows", len(windows)) as update:
            found = compare(
                sides[0], sides[1], windows, num_answers=answers, answer_tokens=answer_tokens,
                on_progress=lambda done, total: update(completed=done),
            )  # fmt: skip
        table = Table("", "value", title=f"{a} ({precision_a}) against {b} ({precision_b})")
        table.add_row("perplexity A", f"{found.perplexity_a:.4f}")
        table.add_row("perplexity B", f"{found.perplexity_b:.4f} ({found.perplexity_change:+.3%})")
        table.add_row("next-token agreement", f"{found.next_token_agreement:.3%} of {found.num_tokens:,}")
        table.add_row("mean KL(A ‖ B)", f"{found.mean_kl:.6f} nats")
        table.add_row("greedy agreement", f"{found.greedy_agreement:.3%} of {found.num_greedy_tokens:,}")
        Console().print(table)
        report = {"a": a, "precision_a": precision_a, "b": b, "precision_b": precision_b} | found.as_dict()
        write_file(json_file, json.dumps(report, indent=1) + "\n")
