"""`tripool doctor`: checks whether this machine can serve a model, and suggests remedies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tripool.cli.options import Model, PrecisionOf
from tripool.config import EngineConfig, GatewayConfig
from tripool.observe.checks import Finding, check_machine

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_ENGINE, _GATEWAY = EngineConfig(), GatewayConfig()


def register(app: typer.Typer) -> None:
    @app.command()
    def doctor(
        model: Model = "tiny",
        host: Annotated[str, typer.Option(help="Address to serve on.")] = _GATEWAY.host,
        port: Annotated[int, typer.Option(min=1, max=65535, help="Port to serve on.")] = _GATEWAY.port,
        precision: PrecisionOf = _ENGINE.precision,
        fix: Annotated[bool, typer.Option("--fix", help="Remove what dead runs left behind.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    ) -> None:
        """Check whether this machine can serve MODEL; exit code 1 if it cannot."""
        from tripool.observe.facts import collect, remove_leftovers  # here, because torch takes seconds

        removed = remove_leftovers() if fix else []
        findings = check_machine(collect(model, GatewayConfig(host=host, port=port), precision))
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            for path in removed:
                typer.echo(f"removed {path}")
            Console().print(render(findings))
        if any(finding.verdict == "fail" for finding in findings):
            raise typer.Exit(1)


def render(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.says)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), Text(finding.name), text)
    return table
