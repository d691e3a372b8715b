"""`tripool topology`: NUMA nodes, CPUs, memory, GPUs and links of this machine, or of a server's hosts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tripool.cli.asking import ApiKey, ask
from tripool.cli.models import FormatOf

_WITHOUT = "only a split server places workers: `tripool serve --split`"


def register(app: typer.Typer) -> None:
    @app.command()
    def topology(
        url: Annotated[str | None, typer.Option(help="Of a server: show its hosts and what runs there.")] = None,
        api_key: ApiKey = None,
        format: FormatOf = "table",
    ) -> None:
        """Show NUMA nodes, CPUs, memory, GPUs and links: of this machine, or of a server's hosts."""
        found: dict[str, Any]
        if url is None:
            import msgspec

            from tripool.observe.topology import read_machine

            found = {"hosts": [{"host": "this machine", "machine": msgspec.to_builtins(read_machine())}], "places": []}
        else:
            pools = ask(url, "/v1/pools", api_key, without=_WITHOUT)
            found = {"hosts": pools["hosts"], "places": pools["places"]}
        if format == "json":
            typer.echo(json.dumps(found, indent=2))
        else:
            Console().print(render(found))


def render(found: dict[str, Any]) -> Group:
    table = Table("host", "node", "CPUs", "memory", "GPUs", "links", box=None, header_style="bold")
    for host in found["hosts"]:
        links = ", ".join(f"{link['name']} {_speed(link['mbit'])}" for link in host["machine"]["links"])
        for first, node in enumerate(host["machine"]["nodes"]):
            table.add_row(
                "" if first else host["host"],
                str(node["number"]),
                ranges(node["cpus"]),
                f"{node['memory_bytes'] / 2**30:.1f} GiB",
                ", ".join(node["gpus"]) or "-",
                "" if first else links or "-",
            )
    lines = [f"{place['want']} rank {place['rank']}: {place['reason']}" for place in found["places"]]
    for host in found["hosts"]:
        for instance, ranks in host.get("ranks", {}).items():
            lines.append(f"{instance} ranks {ranges(ranks)}: host {host['host']}")
    return Group(table, Text("\n".join(lines)))


def _speed(mbit: int) -> str:
    if not mbit:
        return "(speed unknown)"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def ranges(cpus: list[int]) -> str:
    """0, 1, 2, 5 -> `0-2,5`."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
