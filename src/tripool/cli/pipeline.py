"""`tripool pipeline`: from training to service, as one file says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.asking import ApiKey, NoAnswer, ask, post
from tripool.cli.terminal import stderr

if TYPE_CHECKING:
    from tripool.batch.pipeline import Outcome

_FILE = "What is made, and of what (docs/pipeline.md)."
_SHOW = "Show what each stage has made and what would be made, and do nothing."
_PATIENCE_S = 30.0


def register(app: typer.Typer) -> None:
    @app.command()
    def pipeline(
        file: Annotated[Path, typer.Argument(metavar="FILE.toml", help=_FILE)],
        show: Annotated[bool, typer.Option("--status", "--dry-run", help=_SHOW)] = False,
        api_key: ApiKey = None,
    ) -> None:
        """Train or import, quantise, evaluate, register, try and publish a model; resumes where it was killed."""
        import os

        import torch

        from tripool.batch.pipeline import Run, read_pipeline
        from tripool.kernels.cpu8.library import set_threads, variants

        console = stderr()

        def tell(line: str) -> None:
            console.print(line, soft_wrap=True, markup=False)

        planned = read_pipeline(file)
        if show:
            outcome = Run(planned, lambda line: None, None).plan()
        else:
            threads = len(os.sched_getaffinity(0))
            torch.set_num_threads(threads)
            if variants():
                set_threads(threads)
            outcome = Run(planned, tell, lambda url: _Server(url, api_key)).run()
        _print(planned.name, outcome)


def _print(name: str, outcome: Outcome) -> None:
    table = Table("stage", "state", "hash", "seconds", "figures", title=f"pipeline of {name}")
    for row in outcome.rows:
        made = row.artefact
        if made is None:
            table.add_row(row.stage, row.state, "", "", row.note)
            continue
        figures = ", ".join(f"{key} {value:.5g}" for key, value in made.figures.items())
        table.add_row(row.stage, row.state, made.content[:12], f"{made.seconds:.1f}", figures or row.note)
    console = Console()
    console.print(table)
    if outcome.is_running:
        console.print("a run is under way")
    registered = f"registered: {outcome.version}; " if outcome.version else ""
    console.print(f"{registered}published: {outcome.published or 'nothing'}", highlight=False)


class _Server:
    """A `CanaryServer` over HTTP."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key

    def start(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        return post(self._url, f"/v1/canary/{quote(name)}", self._api_key, body, timeout_s=_PATIENCE_S)

    def state(self, name: str) -> dict[str, Any] | None:
        hint = "is it a server that serves this model from the registry, by its name without a version?"
        try:
            return ask(self._url, f"/v1/canary/{quote(name)}", self._api_key, without=hint)
        except NoAnswer as error:
            if error.__cause__ is not None and hasattr(error.__cause__, "code"):  # it answers, and refuses
                raise
            return None
