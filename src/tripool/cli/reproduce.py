"""`tripool reproduce`: published tables of a system beside the planner's predictions, with the error of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tripool.cli.files import write_file
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tripool.planner.reproduce import Table

_SYSTEMS = ("cloudmatrix",)

System = Annotated[str, typer.Argument(help="Which published system: cloudmatrix.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every line here, as JSON.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page with plots here.")]


def register(app: typer.Typer) -> None:
    @app.command()
    def reproduce(system: System = _SYSTEMS[0], json_file: JsonFile = None, html_file: HtmlFile = None) -> None:
        """Print published tables and ablations beside predictions, each with its error."""
        if system not in _SYSTEMS:
            raise InvalidRequest(f"no tables of '{system}'", hint=f"known: {', '.join(_SYSTEMS)}", param="system")
        from tripool.planner.reproduce import cloudmatrix_figures, cloudmatrix_tables
        from tripool.planner.reproduce.lines import tables_data
        from tripool.planner.reproduce.page import render_page

        tables = cloudmatrix_tables()
        if json_file is not None:
            write_file(json_file, json.dumps(tables_data(tables), indent=1) + "\n")
        if html_file is not None:
            write_file(html_file, render_page(tables, cloudmatrix_figures()))
        _show(tables)


def _show(tables: Sequence[Table]) -> None:
    from rich.table import Table as RichTable

    from tripool.cli.plan_run import console
    from tripool.planner.reproduce.lines import HEADS, ROLES, cells, sources, summarise, summary_words

    out, shown = console(), len(HEADS) - 1  # sources are printed below a table: they are long
    for table in tables:
        drawn = RichTable(title=table.title, title_justify="left", caption_justify="left")
        for index, head in enumerate(HEADS[:shown]):
            drawn.add_column(head, justify="right" if 2 <= index <= 4 else "left")
        for line in table.lines:
            drawn.add_row(*cells(line)[:shown])
        out.print(drawn)
        out.print(table.description)
        if found := sources(table):
            out.print(f"sources: {' / '.join(found)}")
        out.print()
    for role, said in ROLES.items():
        out.print(f"{role}: {said}")
    out.print(summary_words(summarise(tables)))
