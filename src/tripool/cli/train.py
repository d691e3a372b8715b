"""`tripool train`: trains a model on a folder of conversations and writes a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tripool.cli.terminal import stderr

_CONFIG = "A TOML file, or the name of one of ours: tripool-tiny, smoke."
_MINUTES = "Fit the schedule to this much time, export included; without it, optimise.steps decides."


def register(app: typer.Typer) -> None:
    @app.command()
    def train(
        config: Annotated[str, typer.Argument(metavar="CONFIG", help=_CONFIG)],
        data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of documents, *.jsonl.")],
        out: Annotated[Path, typer.Option(metavar="DIR", help="State, metrics and the model go here.")],
        minutes: Annotated[float | None, typer.Option(min=0.0, help=_MINUTES)] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on where a run in OUT was stopped.")] = False,
    ) -> None:
        """Train a network on documents and write it as a checkpoint."""
        from tripool.train.config import read_config

        plan = read_config(config)
        from tripool.train.run import train as run  # here, so that a wrong config fails before torch is loaded

        console = stderr()

        def tell(line: str) -> None:
            console.print(line, soft_wrap=True, highlight=False, markup=False)

        run(plan, data, out, minutes=minutes, resume=resume, tell=tell)
