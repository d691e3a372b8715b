"""`tripool keys` and `tripool usage`: API keys, and what tenants used. A running server notices changes of keys."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tripool.cli.options import given
from tripool.cli.terminal import stderr
from tripool.errors import InvalidRequest

if TYPE_CHECKING:
    from tripool.tenants import Key, Tenant
    from tripool.tenants.key_store import KeyStore

KeysFile = Annotated[
    Path | None, typer.Option("--keys", help="The key store; in the state folder of this user when not given.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
_GB = 2**30
_SPAN = re.compile(r"(\d{1,6})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
UsageGroup = Literal["day", "hour", "model", "key", "tenant"]


def open_key_store(path: Path | None) -> KeyStore:
    """An existing one; only `keys add` creates one."""
    from tripool.tenants.key_store import KeyStore, default_path

    return KeyStore(path or default_path())


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="API keys of a server: create, show, revoke.", no_args_is_help=True)
    app.add_typer(keys, name="keys")
    _register_add(keys)
    _register_usage(app)

    @keys.command(name="list")
    def list_keys(keys: KeysFile = None, as_json: AsJson = False) -> None:
        """Show tenants, their limits and their keys; never the keys themselves."""
        with open_key_store(keys) as key_store:
            key_table = key_store.key_table()
        rows = [_row(key, key_table.tenants[key.tenant], time.time()) for key in key_table.keys]
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        table = Table("tenant", "key", "state", "created", "last used", "expires", "limits", box=None)
        for row in rows:
            times = (shown(row["created_s"]), shown(row["last_used_s"]), shown(row["expires_s"]))
            table.add_row(row["tenant"], f"{row['key']}…", row["state"], *times, _limits(row))
        Console().print(table)

    @keys.command()
    def revoke(
        which: Annotated[str, typer.Argument(help="The beginning of a key, or a tenant's name for all of its keys.")],
        keys: KeysFile = None,
        as_json: AsJson = False,
    ) -> None:
        """Revoke a key: a running server refuses it within a second. Answers under way go on."""
        with open_key_store(keys) as key_store:
            revoked = key_store.revoke(which, now_s=time.time())
        if as_json:
            typer.echo(json.dumps({"revoked": revoked}))
        else:
            typer.echo("".join(f"revoked {prefix}…\n" for prefix in revoked) or "revoked before\n", nl=False)


def _register_add(keys: typer.Typer) -> None:
    @keys.command()
    def add(
        name: Annotated[str, typer.Argument(help="Of the tenant; one that exists gets one more key.")],
        rpm: Annotated[float | None, typer.Option(help="Most requests per minute.")] = None,
        tpm: Annotated[float | None, typer.Option(help="Most tokens per minute, cached ones not counted.")] = None,
        cache_gb: Annotated[float | None, typer.Option(min=0, help="Most of the cache pool.")] = None,
        weight: Annotated[float | None, typer.Option(help="Share of work and slots, 1 when not given.")] = None,
        tpot_ms: Annotated[float | None, typer.Option(help="Default TPOT objective.")] = None,
        ttft_ms: Annotated[float | None, typer.Option(help="Default TTFT objective.")] = None,
        public_prefix: Annotated[
            bool | None,
            typer.Option("--public-prefix/--no-public-prefix", help="Share cached system prompts with others who do."),
        ] = None,
        admin: Annotated[bool, typer.Option("--admin", help="May also use the operator's routes.")] = False,
        expires: Annotated[str | None, typer.Option(help="30d, 12h, or a date.")] = None,
        keys: KeysFile = None,
        as_json: AsJson = False,
    ) -> None:
        """Create a key for NAME and show it, once. Limits are the tenant's; those given replace what it had."""
        from tripool.tenants.key_store import KeyStore, check_tenant, default_path

        now_s = time.time()
        cache_bytes = None if cache_gb is None else int(cache_gb * _GB)
        settings = given(rpm=rpm, tpm=tpm, cache_bytes=cache_bytes, weight=weight, tpot_ms=tpot_ms, ttft_ms=ttft_ms)
        settings |= given(public_prefix=public_prefix)
        expires_s = None if expires is None else later_s(expires, now_s=now_s, param="expires")
        check_tenant(name, settings)  # before the store is created
        with KeyStore(keys or default_path(), create=True) as key_store:
            key = key_store.add_key(name, now_s=now_s, settings=settings, admin=admin, expires_s=expires_s)
            path = key_store.path
        if as_json:
            typer.echo(json.dumps({"tenant": name, "key": key, "admin": admin, "expires_s": expires_s}))
        else:
            typer.echo(key)
            stderr().print(f"for {name}, in {path}; it is not shown again", soft_wrap=True)


def _row(key: Key, tenant: Tenant, now_s: float) -> dict[str, Any]:
    state = "revoked" if key.revoked_s is not None else "good" if key.is_good(now_s) else "expired"
    return {
        "tenant": key.tenant,
        "key": key.prefix,
        "admin": key.admin,
        "state": state,
        "created_s": key.created_s,
        "last_used_s": key.last_used_s,
        "expires_s": key.expires_s,
        "rpm": tenant.limits.requests_per_minute,
        "tpm": tenant.limits.tokens_per_minute,
        "cache_bytes": tenant.limits.cache_bytes,
        "weight": tenant.limits.weight,
        "tpot_ms": tenant.tpot_ms,
        "ttft_ms": tenant.ttft_ms,
        "public_prefix": tenant.public_prefix,
    }


def _limits(row: dict[str, Any]) -> str:
    parts = ["admin"] if row["admin"] else []
    parts += [f"{name} {row[name]:g}" for name in ("rpm", "tpm", "tpot_ms", "ttft_ms") if row[name] is not None]
    parts += [f"cache {row['cache_bytes'] / _GB:g} GB"] if row["cache_bytes"] is not None else []
    parts += [f"weight {row['weight']:g}"] if row["weight"] != 1 else []
    parts += ["public prefix"] if row["public_prefix"] else []
    return ", ".join(parts)


def _register_usage(app: typer.Typer) -> None:
    @app.command()
    def usage(
        tenant: Annotated[str | None, typer.Option(help="Only this one.")] = None,
        since: Annotated[str | None, typer.Option(help="12h, 30d, or a date; whole hours.")] = None,
        by: Annotated[UsageGroup, typer.Option(help="What to sum over.")] = "day",
        keys: KeysFile = None,
        as_json: AsJson = False,
    ) -> None:
        """Show requests and tokens by tenant. Hours and days are UTC."""
        from tripool.tenants.usage_log import read_usage

        since_s = None if since is None else ago_s(since, now_s=time.time(), param="since")
        with open_key_store(keys) as key_store:
            rows = read_usage(key_store, tenant=tenant, since_s=since_s, by=by)
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        table = Table("tenant", *([by] if by != "tenant" else []), box=None)
        numbers = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
        for name in numbers:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            group = [] if by == "tenant" else [_shown_group(row[by], by)]
            table.add_row(row["tenant"], *group, *(f"{row[name]:,}" for name in numbers))
        Console().print(table)


def _shown_group(value: object, by: UsageGroup) -> str:
    if by not in ("day", "hour"):
        return str(value)
    assert isinstance(value, int)
    return shown(value)[: 10 if by == "day" else None]


# Times on the command line: durations such as `90m`, `12h`, `30d`, or a date, in UTC.


def span_s(text: str) -> float | None:
    found = _SPAN.fullmatch(text)
    return None if found is None else int(found[1]) * float(_SECONDS[found[2]])


def later_s(text: str, *, now_s: float, param: str) -> float:
    span = span_s(text)
    return now_s + span if span is not None else _date_s(text, param)


def ago_s(text: str, *, now_s: float, param: str) -> float:
    span = span_s(text)
    return now_s - span if span is not None else _date_s(text, param)


def _date_s(text: str, param: str) -> float:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        hint = "a duration such as 90m, 12h or 30d, or a date such as 2026-12-31"
        raise InvalidRequest(f"'{text[:50]}' is not a time", hint=hint, param=param) from error


def shown(at_s: float | None) -> str:
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
