"""`tripool explain ID`: where a request's time went, where it ran and why, what was cached, what held it back.

Depends on the layout of the server's response only: facts are shown under whatever names a backend gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tripool.cli.asking import DEFAULT_URL, ApiKey, Url, ask
from tripool.cli.models import FormatOf
from tripool.cli.terminal import harmless

_BAR = 30
_STAGES = ("gateway", "queue", "lookup", "prefill", "transfer", "decode")
_UNKNOWN = "a server remembers its last 1,000 requests, by the answer's id or the X-Request-Id"


def register(app: typer.Typer) -> None:
    @app.command()
    def explain(
        id: Annotated[str, typer.Argument(help="Of the answer, or the request's X-Request-Id.")],
        url: Url = DEFAULT_URL,
        api_key: ApiKey = None,
        format: FormatOf = "table",
    ) -> None:
        """Show where a request's time went, where it ran and why, and what held it back."""
        answer = ask(url, f"/v1/requests/{quote(id, safe='')}/explain", api_key, without=_UNKNOWN)
        if format == "json":
            typer.echo(json.dumps(answer, indent=2))
        else:
            Console().print(render(answer))


def render(answer: Mapping[str, Any]) -> Group:
    return Group(*_parts(answer))


def _parts(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(_headline(answer), style="bold")
    yield Text(_tokens(answer))
    yield Text("")
    yield _times(answer["timing"])
    for number, facts in enumerate(answer["placement"]):
        yield Text("")
        if len(answer["placement"]) > 1:
            yield Text(f"prompt {number}", style="bold")
        yield from _facts(facts)


def _headline(answer: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in answer["finish_reasons"].items())
    how = reasons or answer["error"] or ""
    kind = f"{answer['api']}, streamed" if answer["stream"] else str(answer["api"])
    return f"{_plain(answer['id'])}: {answer['state']}" + (f" ({how})" if how else "") + f", {kind}"


def _tokens(answer: Mapping[str, Any]) -> str:
    line = f"{answer['prompt_tokens']:,} prompt tokens, {answer['cached_tokens']:,} of them cached; "
    line += f"{answer['completion_tokens']:,} answered"
    if answer["prompts"] > 1:
        line += f" to {answer['prompts']} prompts"
    if answer["n"] > 1:
        line += f" in {answer['n']} choices" + (" each" if answer["prompts"] > 1 else "")
    if answer["draft_tokens"]:
        line += f"; {answer['accepted_draft_tokens']:,} of {answer['draft_tokens']:,} drafts accepted"
    return line


def _times(timing: Mapping[str, float]) -> Table:
    """The stages, which add up to the total, and the latencies of the client."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    total = timing["total"] or 1.0
    named = [stage for stage in _STAGES if stage in timing]
    for stage in named + [name for name in timing if name not in (*_STAGES, "first_token", "per_token", "total")]:
        table.add_row(Text(stage), f"{timing[stage]:,.1f} ms", "█" * round(_BAR * timing[stage] / total))
    table.add_row("total", f"{timing['total']:,.1f} ms", "", style="bold")
    table.add_row("first token after", f"{timing['first_token']:,.1f} ms")
    table.add_row("then per token", f"{timing['per_token']:,.1f} ms")
    return table


def _facts(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Values as lines, lists of rows as tables below them."""
    plain = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        if value is not None and not isinstance(value, list):
            plain.add_row(Text(_plain(name)), Text(_plain(value)))
    yield plain
    for name, value in facts.items():
        if isinstance(value, list) and value:
            yield Text(f"\n{_plain(name)}")
            yield Padding(_rows(value), (0, 0, 0, 2))


def _rows(rows: list[Mapping[str, Any]]) -> Table:
    """Columns in order of first appearance; empty ones are left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, header_style="bold", pad_edge=False)
    filled = [name for name in names if any(row.get(name) not in ("", None) for row in rows)]
    for name in filled:
        numbers = all(isinstance(row.get(name), (int, float)) for row in rows)
        table.add_column(Text(_plain(name)), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(_plain(row.get(name, ""))) for name in filled))
    return table


def _plain(value: object) -> str:
    """Ids are chosen by clients: they must not control a terminal."""
    return harmless(f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value))
