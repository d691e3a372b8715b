"""`tripool version`."""

from __future__ import annotations

import typer

from tripool import __version__


def register(app: typer.Typer) -> None:
    @app.command()
    def version() -> None:
        """Print the version."""
        typer.echo(f"tripool {__version__}")
