"""`tripool batch`: maps a table through a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tripool.cli.asking import ApiKey
from tripool.cli.files import read_file
from tripool.cli.options import Load, engine_options, sampling_options
from tripool.cli.terminal import progress, stderr
from tripool.config import EngineConfig
from tripool.errors import InvalidRequest

_MODEL = "A name or a path, as for `generate`; with --url a model of that server, its first when not given."
_INPUT = "A .parquet or .jsonl file, a folder of them or a pattern; may be given several times."
_OUT = "A folder; the same command goes on with what is there."
_PROMPT = "The user's message, or @FILE: a template over the row's columns, like 'Summarise: {{ text }}'."
_COMPLETE = "Go on from the prompt as bare text, without the chat template."
_SCHEMA = "A JSON schema of an object, or @FILE: its properties become typed columns."
_KEY = "Rows with the same value here get the same seed; the row's position in the input when not given."
_SQL = "A query over the table `rows`, or @FILE; DuckDB runs it on each partition before the model."
_PARTITION = "rows:COUNT, files, or hash:COLUMN:COUNT."
_FORMAT = "parquet or jsonl; that of the input when not given."
_URL = "Of a running server: all its workers answer. Without it the model runs in this process."
_ON = "here, or ray: partitions over all nodes of a Ray cluster, which see the same folders."


def register(app: typer.Typer, load: Load) -> None:
    @app.command()
    @engine_options()
    @sampling_options
    def batch(
        model: Annotated[str | None, typer.Argument(help=_MODEL)] = None,
        *,
        inputs: Annotated[list[str], typer.Option("--in", help=_INPUT)],
        out: Annotated[Path, typer.Option(help=_OUT)],
        prompt: Annotated[str, typer.Option(help=_PROMPT)],
        system: Annotated[str | None, typer.Option(help="The system message, or @FILE: a template, too.")] = None,
        complete: Annotated[bool, typer.Option("--complete", help=_COMPLETE)] = False,
        schema: Annotated[str | None, typer.Option(help=_SCHEMA)] = None,
        column: Annotated[str, typer.Option(help="Of the answer's text, without --schema.")] = "answer",
        key: Annotated[str | None, typer.Option(help=_KEY)] = None,
        sql: Annotated[str | None, typer.Option(help=_SQL)] = None,
        partition: Annotated[str, typer.Option(help=_PARTITION)] = "rows:1000",
        format: Annotated[Literal["parquet", "jsonl"] | None, typer.Option(help=_FORMAT)] = None,
        url: Annotated[str | None, typer.Option(help=_URL)] = None,
        api_key: ApiKey = None,
        at_once: Annotated[int, typer.Option(min=1, max=4096, help="With --url: requests under way.")] = 64,
        on: Annotated[Literal["here", "ray"], typer.Option(help=_ON)] = "here",
        sampling: dict[str, Any],
        config: EngineConfig,
    ) -> None:
        """Ask MODEL about every row of a table; its answers become columns. Bad rows go to OUT/_bad."""
        from tripool.batch import LocalModel, Partitioning, ServedModel, TableJob, run_table, run_table_on_ray

        seed = sampling.pop("seed", 0)
        job = TableJob(
            inputs=tuple(inputs), out=str(out), prompt=_text(prompt),
            system=None if system is None else _text(system), complete=complete,
            schema=None if schema is None else _json(_text(schema)), column=column, sampling=sampling, seed=seed,
            key=key, sql=None if sql is None else _text(sql), partition=Partitioning.parse(partition), format=format,
        )  # fmt: skip
        if url is None and model is None:
            raise InvalidRequest("no model is named", hint="name one, or a server by --url", param="model")
        run = run_table if on == "here" else run_table_on_ray
        if url is not None:
            where: ServedModel | LocalModel = ServedModel(url, model, api_key=api_key, at_once=at_once)
        else:
            where = LocalModel(model or "", config, load if on == "here" else None)
        with ExitStack() as shown:
            done = run(job, where, on_progress=_Bar(where.name, shown))
        summary = f"{done.rows:,} rows answered, {done.bad:,} bad, in {done.partitions:,} partitions"
        typer.echo(summary + (f", {done.resumed:,} of them from before" if done.resumed else ""))


class _Bar:
    """A bar on a terminal, from the first row on: before it, the model's own display of its loading is there."""

    def __init__(self, name: str, shown: ExitStack) -> None:
        self._name, self._shown = name, shown
        self._update: Callable[..., None] | None = None
        self._before: int | None = None

    def __call__(self, ready: int, total: int) -> None:
        if self._before is None:
            self._before = ready
            return
        if self._update is None:
            bar = progress(self._name, total, enabled=stderr().is_terminal)
            self._update = self._shown.enter_context(bar)
            self._update(completed=self._before)  # the estimate counts from here
        self._update(completed=ready)


def _text(option: str) -> str:
    """What an option says, or the content of the @FILE that it names."""
    return read_file(Path(option[1:])) if option.startswith("@") else option


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"the schema is not JSON: {error}", hint="see docs/batch.md", param="schema") from error
