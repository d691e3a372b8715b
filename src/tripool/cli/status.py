"""`tripool status`: the pools of a server that runs, as they are now."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tripool.cli.models import Format
from tripool.config import GatewayConfig
from tripool.errors import TripoolError

_TIMEOUT_S = 5.0
_GATEWAY = GatewayConfig()


class NoAnswer(TripoolError):
    status = 503
    code = "no_answer"


def register(app: typer.Typer) -> None:
    @app.command()
    def status(
        url: Annotated[str, typer.Option(help="Of the server.")] = f"http://{_GATEWAY.host}:{_GATEWAY.port}",
        watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
        format: Annotated[Format, typer.Option(help="For people, or for programs.")] = Format.table,
    ) -> None:
        """Show the pools of a split server: workers, load, requests by stage."""
        pools = read_pools(url)
        if format is Format.json:
            typer.echo(json.dumps(pools, indent=2))
        elif not watch:
            Console().print(render(pools))
        else:
            with Live(render(pools), console=Console(), auto_refresh=False) as live:
                while True:
                    time.sleep(1.0)
                    live.update(render(read_pools(url)), refresh=True)


def read_pools(url: str) -> dict[str, Any]:
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/pools"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
            pools: dict[str, Any] = json.load(answer)
            return pools
    except urllib.error.HTTPError as error:
        hint = "only a split server has pools: `tripool serve --split`"
        raise NoAnswer(f"{address} answers {error.code}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{address} does not answer: {error}", hint="is `tripool serve --split` running?") from error


def render(pools: dict[str, Any]) -> Group:
    table = Table("worker", "pid", box=None, header_style="bold")
    for column in ("steps", "requests", "running", "waiting tokens", "blocks held", "KV promised"):
        table.add_column(column, justify="right")
    for worker in pools["workers"]:
        table.add_row(
            worker["worker"] + (" (draining)" if worker["draining"] else ""),
            str(worker["pid"]),
            f"{worker['steps']:,}",
            str(worker["placed"]),
            str(worker["running"]),
            f"{worker['waiting_tokens']:,}",
            str(worker["blocks_held"]),
            f"{100 * worker['placed_tokens'] / worker['kv_tokens']:.0f} %",
        )
    stages = ", ".join(f"{count} {stage}" for stage, count in pools["stages"].items() if stage != "done")
    lines = [f"{pools['requests']} requests" + (f": {stages}" if stages else ""), f"join: {pools['join']}"]
    return Group(table, *([_cache_table(pools["cache"])] if pools["cache"] else []), Text("\n".join(lines)))


def _cache_table(members: list[dict[str, Any]]) -> Table:
    table = Table("cache", box=None, header_style="bold")
    for column in ("blocks", "of", "hits", "misses", "evicted", "leases"):
        table.add_column(column, justify="right")
    for member in members:
        if member["away"]:
            table.add_row(f"{member['member']} (away)")
        else:
            counts = (member[name] for name in ("committed", "slots", "hits", "misses", "evicted", "leases"))
            table.add_row(member["member"], *(f"{count:,}" for count in counts))
    return table
