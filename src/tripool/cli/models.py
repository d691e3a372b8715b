"""`tripool models`: what can be served by name, and whether it is here."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


class Format(StrEnum):
    table = "table"
    json = "json"


def register(app: typer.Typer) -> None:
    @app.command()
    def models(
        format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
    ) -> None:
        """Show the models known by name, their size and architecture."""
        from tripool.checkpoints import list_models

        entries = list_models()
        if format is Format.json:
            rows = [
                {
                    "name": entry.name,
                    "architecture": entry.architecture,
                    "parameters": entry.parameters,
                    "stored_bytes": entry.stored_bytes,
                    "present": entry.present,
                    "path": str(entry.path),
                }
                for entry in entries
            ]
            typer.echo(json.dumps(rows, indent=2))
            return
        table = Table("name", "architecture")
        for numbers in ("parameters", "stored"):
            table.add_column(numbers, justify="right")
        table.add_column("here")
        for entry in entries:
            here = "yes" if entry.present else "fetched on first use"
            parameters, stored = f"{entry.parameters / 1e6:,.1f} M", f"{entry.stored_bytes / 1e6:,.1f} MB"
            table.add_row(entry.name, entry.architecture, parameters, stored, here)
        Console().print(table)
