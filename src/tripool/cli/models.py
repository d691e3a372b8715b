"""`tripool models`: models known by name, versions in the registry, and the models in a running server's memory."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.asking import DEFAULT_URL, ApiKey, Url, ask, post

if TYPE_CHECKING:
    from tripool.checkpoints import Registered

_PATIENCE_S = 660.0
"""A large model takes minutes to load; the server has its own deadlines."""


Format = Literal["table", "json"]
FormatOf = Annotated[Format, typer.Option(help="For people, or for programs.")]
_Registered = Annotated[str, typer.Argument(metavar="NAME", help="A name of the registry, or REGISTRY/NAME.")]
_Version = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="As `tripool models history NAME` shows it.")]
_Model = Annotated[str, typer.Argument(help="As `tripool models list` shows it.")]


def register(app: typer.Typer) -> None:
    models = typer.Typer(help="Show models by name; publish versions, roll back; load and unload in a running server.")
    app.add_typer(models, name="models")

    @models.callback(invoke_without_command=True)
    def known(context: typer.Context, format: FormatOf = "table") -> None:
        """Show the models known by name, registered ones with what is published: size and architecture."""
        if context.invoked_subcommand is None:
            _show_known(format)

    @models.command(name="list")
    def list_(url: Url = DEFAULT_URL, api_key: ApiKey = None, format: FormatOf = "table") -> None:
        """Show the models of a running server: which are in memory, and how much they take."""
        served = ask(url, "/v1/models", api_key, without="is it a Tripool server?")["data"]
        if format == "json":
            typer.echo(json.dumps(served, indent=2))
        else:
            Console().print(_served_table(served))

    @models.command()
    def load(model: _Model, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
        """Load MODEL in a running server; returns when it is ready."""
        loaded = post(url, "/v1/models/load", api_key, {"model": model}, timeout_s=_PATIENCE_S)
        took = f" in {loaded['load_s']:.2f} s" if "load_s" in loaded else ""
        typer.echo(f"{model} is {loaded['state']}{took}{' (model cache)' if loaded.get('from_model_cache') else ''}")

    @models.command()
    def unload(model: _Model, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
        """Finish MODEL's open answers and free its memory. It stays unloaded until it is loaded again."""
        unloaded = post(url, "/v1/models/unload", api_key, {"model": model}, timeout_s=_PATIENCE_S)
        still = f": {unloaded['open']} answers are still open" if unloaded.get("open") else ""
        typer.echo(f"{model} is {unloaded['state']}{still}")

    @models.command()
    def history(name: _Registered, format: FormatOf = "table") -> None:
        """Show the versions of NAME in the registry: contents, origin, figures, and which one is published."""
        _show_history(name, format)

    @models.command()
    def publish(version: _Version) -> None:
        """Publish VERSION: servers of its name switch to it within seconds."""
        from tripool.checkpoints import registered
        from tripool.errors import InvalidRequest

        found = registered(version)
        if found is None or found.number is None:
            raise InvalidRequest(f"'{version}' is no version of a registered model", hint="such as my-model@2")
        found.registry.publish(found.name, found.number)
        typer.echo(f"{found.name}@{found.number} is published")

    @models.command()
    def rollback(name: _Registered) -> None:
        """Publish again what was published before: servers of NAME switch back within seconds."""
        found = _registered(name)
        typer.echo(f"{found.name}@{found.registry.roll_back(found.name)} is published")

    @models.command()
    def forget() -> None:
        """Give back the shared memory that servers with --keep-models left."""
        from tripool.serving.weight_cache import forget_kept_weights

        typer.echo("the kept models are gone" if forget_kept_weights() else "no models were kept")


def _registered(name: str) -> Registered:
    from tripool.checkpoints import Registry, registered
    from tripool.errors import ModelNotFound

    found = registered(name)
    if found is None:
        known = ", ".join(Registry().names()) or "none"
        raise ModelNotFound(f"'{name}' is in no registry", hint=f"registered by name: {known}; or REGISTRY/NAME")
    return found


def _show_history(name: str, format: Format) -> None:
    found = _registered(name)
    versions, published = found.registry.versions(found.name), found.registry.published(found.name)
    if format == "json":
        rows = [
            {
                "name": one.label, "published": one.number == published, "content": one.content, "path": str(one.path),
                "created": one.created_s, "lineage": one.lineage,
            }
            for one in versions
        ]  # fmt: skip
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("version", "published", "contents", "made", "from", "figures")
    for one in versions:
        made = datetime.fromtimestamp(one.created_s, UTC).strftime("%Y-%m-%d %H:%M")
        figures = ", ".join(f"{key} {value:.5g}" for key, value in one.lineage.get("figures", {}).items())
        source = "".join(stage["stage"] for stage in one.lineage.get("stages", [])[:1])
        table.add_row(one.label, "yes" if one.number == published else "", one.content[:12], made, source, figures)
    Console().print(table)


def _show_known(format: Format) -> None:
    from tripool.checkpoints import list_models

    entries = list_models()
    if format == "json":
        names = ("name", "architecture", "parameters", "stored_bytes", "present")
        rows = [{name: getattr(entry, name) for name in names} | {"path": str(entry.path)} for entry in entries]
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


def _served_table(served: list[dict[str, Any]]) -> Table:
    table = Table("model", "state", box=None, header_style="bold")
    for column in ("memory", "open", "context", "loaded in"):
        table.add_column(column, justify="right")
    for model in served:
        cached = " (model cache)" if model.get("from_model_cache") else ""
        table.add_row(
            model["id"] + (" (default)" if model.get("default") else ""),
            model["state"],
            f"{model['bytes'] / 1e6:,.0f} MB" if "bytes" in model else "",
            str(model.get("open", "")),
            f"{model['max_model_len']:,}",
            f"{model['load_s']:.2f} s{cached}" if "load_s" in model else "",
        )
    return table
