"""`tripool`: registers the commands, and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from tripool import __version__
from tripool.cli import (
    batch,
    bench,
    cache,
    chat,
    doctor,
    engine,
    evaluate,
    explain,
    generate,
    keys,
    models,
    pipeline,
    plan,
    processes,
    quantize,
    reproduce,
    serve,
    simulate,
    status,
    topology,
    train,
)
from tripool.cli.options import TRIPOOL, Load
from tripool.cli.terminal import load_model, print_error
from tripool.errors import TripoolError


def create_cli(load: Load = load_model, program: Sequence[str] = TRIPOOL) -> typer.Typer:
    """`load` makes an engine from a model's name; `program` starts a process with this command line."""
    app = typer.Typer(
        name="tripool",
        help="Serve mixture-of-experts language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    serve.register(app, load, program)
    for loading in (engine, chat, generate, batch):
        loading.register(app, load)
    plain = (
        bench, reproduce, models, plan, simulate, status, keys, cache, doctor, explain, processes, quantize, evaluate,
        topology, train, pipeline,
    )  # fmt: skip
    for verb in plain:
        verb.register(app)

    @app.command()
    def version() -> None:
        """Print the version."""
        typer.echo(f"tripool {__version__}")

    return app


def main(argv: Sequence[str] | None = None, load: Load = load_model, program: Sequence[str] = TRIPOOL) -> None:
    """Exits with 0, with 2 for an error that a user can fix, or with 130 after Ctrl-C (which typer handles)."""
    try:
        create_cli(load, program)(args=argv)
    except TripoolError as error:
        print_error(error)
        sys.exit(2)
