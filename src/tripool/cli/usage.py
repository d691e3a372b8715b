"""`tripool usage`: requests and tokens of tenants, from the usage log."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.keys import AsJson, KeysFile, open_key_store
from tripool.cli.when import ago_s, shown


class Group(StrEnum):
    day = "day"
    hour = "hour"
    model = "model"
    key = "key"
    tenant = "tenant"


def register(app: typer.Typer) -> None:
    @app.command()
    def usage(
        tenant: Annotated[str | None, typer.Option(help="Only this one.")] = None,
        since: Annotated[str | None, typer.Option(help="12h, 30d, or a date; whole hours.")] = None,
        by: Annotated[Group, typer.Option(help="What to sum over.")] = Group.day,
        keys: KeysFile = None,
        as_json: AsJson = False,
    ) -> None:
        """Show requests and tokens by tenant. Hours and days are UTC."""
        from tripool.tenants.usage_log import read_usage

        since_s = None if since is None else ago_s(since, now_s=time.time(), param="since")
        with open_key_store(keys) as key_store:
            rows = read_usage(key_store, tenant=tenant, since_s=since_s, by=by.value)
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        table = Table("tenant", *([by.value] if by is not Group.tenant else []), box=None)
        numbers = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        for name in numbers:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            group = [] if by is Group.tenant else [_shown(row[by.value], by)]
            table.add_row(row["tenant"], *group, *(f"{row[name]:,}" for name in numbers))
        Console().print(table)


def _shown(value: object, by: Group) -> str:
    if by not in (Group.day, Group.hour):
        return str(value)
    assert isinstance(value, int)
    return shown(value)[: 10 if by is Group.day else None]
