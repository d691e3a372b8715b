"""`tripool status`: the pools of a running server."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tripool.cli.asking import DEFAULT_URL, ApiKey, Url, ask
from tripool.cli.models import FormatOf

_WITHOUT = "only a split server has pools: `tripool serve --split`"


def register(app: typer.Typer) -> None:
    @app.command()
    def status(
        url: Url = DEFAULT_URL,
        api_key: ApiKey = None,
        watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
        format: FormatOf = "table",
    ) -> None:
        """Show the pools of a split server: workers, load, requests by stage."""
        pools = ask(url, "/v1/pools", api_key, without=_WITHOUT)
        if format == "json":
            typer.echo(json.dumps(pools, indent=2))
        elif not watch:
            Console().print(render(pools))
        else:
            with Live(render(pools), console=Console(), auto_refresh=False) as live:
                while True:
                    time.sleep(1.0)
                    live.update(render(ask(url, "/v1/pools", api_key, without=_WITHOUT)), refresh=True)


def render(pools: dict[str, Any]) -> Group:
    several = len({worker["model"] for worker in pools["workers"]}) > 1
    table = Table("worker", *(["model"] if several else []), "pid", box=None, header_style="bold")
    for column in ("steps", "requests", "running", "waiting tokens", "blocks held", "KV reserved"):
        table.add_column(column, justify="right")
    for worker in pools["workers"]:
        table.add_row(
            worker["worker"] + _remark(worker),
            *([worker["model"]] if several else []),
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
    hosts = pools.get("hosts", ())
    lines += [f"host {host['host']}: {host['address'] or 'not reached by others'}" for host in hosts[1:]]
    tables = [table, *map(_instance_table, pools.get("instances", ()))]
    tables += [*([_cache_table(pools["cache"])] if pools["cache"] else [])]
    with_disk = [member for member in pools["cache"] if member.get("disk")]
    tables += [_disk_table(with_disk)] if with_disk else []
    return Group(*tables, Text("\n".join(lines)))


def _remark(worker: dict[str, Any]) -> str:
    if worker["draining"]:
        return " (draining)"
    return f" (only {worker['reserved_for']})" if worker.get("reserved_for") else ""


def _instance_table(instance: dict[str, Any]) -> Table:
    about = f"{instance['name']}: map {instance['epoch']}, up to {instance['replicas']} replicas"
    about += f", {instance['copies']:,} copied, imbalance {instance['imbalance']:.2f}"
    table = Table(about, box=None, header_style="bold")
    for column in ("experts", "rows"):
        table.add_column(column, justify="right")
    for number, rank in enumerate(instance["ranks"]):
        table.add_row(
            f"rank {number}" + ("" if rank["present"] else " (gone)"), f"{rank['experts']:,}", f"{rank['rows']:,}"
        )
    return table


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


def _disk_table(members: list[dict[str, Any]]) -> Table:
    table = Table("disk", "state", box=None, header_style="bold")
    for column in ("blocks", "GB", "of", "written", "read", "lost", "bad"):
        table.add_column(column, justify="right")
    for member in members:
        disk = member["disk"]
        sizes = (f"{disk[name] / 2**30:.2f}" for name in ("used_bytes", "num_bytes"))
        counts = (f"{disk[name]:,}" for name in ("written", "promoted", "lost", "bad"))
        table.add_row(member["member"], disk["state"], f"{disk['blocks']:,}", *sizes, *counts)
    return table
