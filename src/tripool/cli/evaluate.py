"""`tripool eval`: how far two checkpoints agree, and what a model scores on tasks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.files import write_file
from tripool.cli.terminal import progress
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.quant import Score

Arithmetic = Literal["float32", "int8", "w8a8"]
_HOW = "float32; int8: our 8-bit kernels; w8a8: the layout's integers and rounding per token, in plain torch."
_B = "The checkpoint to compare with it; not needed for tasks."
_TEXT = "A file of plain text, other than what B was calibrated on; with B."
_TASKS = "Score the models on these tasks: questions with choices or answers, .jsonl or .toml (docs/quantize.md)."


def register(app: typer.Typer) -> None:
    @app.command(name="eval")
    def evaluate(
        a: Annotated[str, typer.Argument(metavar="A", help="The reference checkpoint, such as the original.")],
        b: Annotated[str | None, typer.Argument(metavar="[B]", help=_B)] = None,
        text: Annotated[Path | None, typer.Option(help=_TEXT)] = None,
        tasks: Annotated[Path | None, typer.Option(help=_TASKS)] = None,
        tokens: Annotated[int, typer.Option(min=2, help="Read at most this much of the text.")] = 8192,
        window: Annotated[int, typer.Option(min=64, help="Tokens read at a time.")] = 512,
        answers: Annotated[int, typer.Option(min=0, help="Greedy answers to compare, one for each window.")] = 16,
        answer_tokens: Annotated[int, typer.Option(min=1, help="Length of a greedy answer.")] = 32,
        precision_a: Annotated[Arithmetic, typer.Option(help=f"How A computes. {_HOW}")] = "float32",
        precision_b: Annotated[Arithmetic, typer.Option(help="How B computes.")] = "int8",
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here, too.")] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores when not given.")] = None,
    ) -> None:
        """Compare B with A on a text (perplexity, agreement, KL), or score models on tasks."""
        import os

        import torch

        from tripool.kernels.cpu8.library import set_threads

        if text is None and tasks is None:
            raise InvalidRequest("nothing to read", hint="give --text FILE, or --tasks FILE", param="text")
        if text is not None and b is None:
            raise InvalidRequest("a text compares two checkpoints", hint="give B too", param="b")
        threads = threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        if "int8" in (precision_a, precision_b):
            set_threads(threads)
        report: dict[str, Any] = {"a": a, "precision_a": precision_a, "b": b, "precision_b": precision_b}
        if text is not None and b is not None:
            report |= _compared(
                (a, b), (precision_a, precision_b), text, tokens=tokens, window=window, answers=answers,
                answer_tokens=answer_tokens,
            )  # fmt: skip
        if tasks is not None:
            sides = [(a, precision_a)] + ([(b, precision_b)] if b is not None else [])
            report["tasks"] = _scored(sides, tasks)
        write_file(json_file, json.dumps(report, indent=1) + "\n")


def _compared(
    names: tuple[str, str],
    precisions: tuple[Arithmetic, Arithmetic],
    text: Path,
    *,
    tokens: int,
    window: int,
    answers: int,
    answer_tokens: int,
) -> dict[str, Any]:
    from tripool.checkpoints import open_checkpoint
    from tripool.quant import Side, compare, read_windows
    from tripool.text import Tokenizer

    (a, b), sides = names, []
    with open_checkpoint(a) as first:
        windows = read_windows(text, Tokenizer(first.text), num_tokens=tokens, window=window)
        context = max(window, answer_tokens + 64)
    for name, arithmetic in zip(names, precisions, strict=True):
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
    table = Table("", "value", title=f"{a} ({precisions[0]}) against {b} ({precisions[1]})")
    table.add_row("perplexity A", f"{found.perplexity_a:.4f}")
    table.add_row("perplexity B", f"{found.perplexity_b:.4f} ({found.perplexity_change:+.3%})")
    table.add_row("next-token agreement", f"{found.next_token_agreement:.3%} of {found.num_tokens:,}")
    table.add_row("mean KL(A ‖ B)", f"{found.mean_kl:.6f} nats")
    table.add_row("greedy agreement", f"{found.greedy_agreement:.3%} of {found.num_greedy_tokens:,}")
    Console().print(table)
    return found.as_dict()


def _scored(sides: list[tuple[str, Arithmetic]], file: Path) -> list[dict[str, Any]]:
    """By model; prints one table of all."""
    from tripool.checkpoints import open_checkpoint
    from tripool.quant import read_tasks, score

    tasks = read_tasks(file)
    found: list[tuple[str, Arithmetic, list[Score]]] = []
    for name, arithmetic in sides:
        with open_checkpoint(name) as checkpoint, progress(name, None) as update:
            scores = score(
                checkpoint, arithmetic, tasks, on_progress=lambda done, total: update(completed=done, total=total)
            )
        found.append((name, arithmetic, scores))
    table = Table("task", "questions", "figure", title=f"scores on {file.name}")
    for name, arithmetic, _ in found:
        table.add_column(f"{name} ({arithmetic})", justify="right")
    for i, task in enumerate(tasks):
        for figure in task.figures:
            values = [f"{one[i].figures[figure]:.4f} ± {one[i].errors[figure]:.4f}" for _, _, one in found]
            table.add_row(task.name, str(len(task.questions)), figure, *values)
    Console().print(table)
    return [
        {"model": name, "precision": arithmetic, "scores": [asdict(one) for one in scores]}
        for name, arithmetic, scores in found
    ]
