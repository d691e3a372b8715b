"""`tripool cache`: what tenants hold of the cache pool, and their quotas."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tripool.cli.asking import DEFAULT_URL, ApiKey, Url, ask
from tripool.cli.keys import AsJson, KeysFile, open_key_store

_GB = 2**30
_WITHOUT = "only a split server has a cache pool: `tripool serve --split`"
_Tenant = Annotated[str, typer.Argument(help="A tenant's name.")]


def register(app: typer.Typer) -> None:
    cache = typer.Typer(help="The cache pool: usage and quotas of tenants.", no_args_is_help=True)
    app.add_typer(cache, name="cache")

    @cache.command()
    def stats(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
        """Ask a running server what each tenant holds."""
        stats = ask(url, "/v1/cache", api_key, without=_WITHOUT)
        if as_json:
            typer.echo(json.dumps(stats, indent=2))
            return
        table = Table("tenant", box=None)
        for column in ("holds", "quota"):
            table.add_column(column, justify="right")
        for row in stats["tenants"]:
            quota = "" if row["quota_bytes"] is None else f"{row['quota_bytes'] / 2**20:,.1f} MB"
            table.add_row(row["tenant"], f"{row['held_bytes'] / 2**20:,.1f} MB", quota)
        table.add_row("(public prefixes)", f"{stats['public_bytes'] / 2**20:,.1f} MB")
        if stats["other_bytes"]:
            table.add_row("(without a tenant)", f"{stats['other_bytes'] / 2**20:,.1f} MB")
        away = sum(member["away"] for member in stats["members"])
        line = f"{len(stats['members'])} members ({away} away), {stats['bytes'] / 2**20:,.1f} MB; "
        line += f"{stats['hits']:,} blocks found, {stats['misses']:,} missed, {stats['evicted']:,} forgotten for room"
        Console().print(Group(table, Text(line)))

    @cache.command()
    def quota(
        tenant: _Tenant,
        gb: Annotated[float, typer.Argument(min=0, help="Most that it may hold, in GB; 0 caches nothing.")],
        keys: KeysFile = None,
    ) -> None:
        """Change the quota of TENANT. A running server applies it within seconds."""
        with open_key_store(keys) as key_store:
            key_store.change(tenant, {"cache_bytes": int(gb * _GB)})
        typer.echo(f"{tenant} may hold {gb:g} GB")

    @cache.command()
    def purge(tenant: _Tenant, keys: KeysFile = None) -> None:
        """Drop all that was cached for TENANT.

        A running server finds none of it any more within a second, in any engine; the cache pool's memory is free soon
        after. Public prefixes stay: other tenants share them.
        """
        with open_key_store(keys) as key_store:
            key_store.renew_namespace(tenant)
        typer.echo(f"nothing that was cached for {tenant} will be found again")
