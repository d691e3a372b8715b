"""From a row to a request and from an answer to columns: prompt templates, seeds, structured output."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tripool.batch.columns import DoesNotFit, read_object
from tripool.batch.job import Asked, BadTable, Reply, TableJob

_WHOLE_ROW = "row"
_ASKS_WHETHER = ("defined", "undefined", "default", "d")
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
_SHOWN = 300


class BadRow(Exception):
    """A row that cannot be asked about, or whose answer cannot be used. `code` is short and equal for equal reasons."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason[:_SHOWN]


class Asker:
    """For one job: makes a row's request, reads its answer. Nothing here depends on other rows."""

    def __init__(self, job: TableJob) -> None:
        self._job, self._columns = job, job.columns()
        self._templates = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        names: set[str] = set()
        self._optional: set[str] = set()
        self._prompt = self._compiled(job.prompt, "prompt", names)
        self._system = None if job.system is None else self._compiled(job.system, "system", names)
        self.whole_row = _WHOLE_ROW in names
        """Whether a template reads the row as a whole."""
        self.used = names - {_WHOLE_ROW} | ({job.key} if job.key is not None else set())
        """Columns that are read."""
        self.needed = self.used - self._optional
        """Columns without which no row can be asked about."""
        self.names = tuple(column.name for column in self._columns)

    def _compiled(self, source: str, param: str, names: set[str]) -> jinja2.Template:
        try:
            parsed = self._templates.parse(source)
            names |= jinja2.meta.find_undeclared_variables(parsed)
            for node in parsed.find_all((jinja2.nodes.Test, jinja2.nodes.Filter)):
                if node.name in _ASKS_WHETHER and isinstance(node.node, jinja2.nodes.Name):
                    self._optional.add(node.node.name)
            return self._templates.from_string(source)
        except jinja2.TemplateError as error:
            raise BadTable(
                f"the {param} is no template: {error}", hint="columns are {{ name }}", param=param
            ) from error

    def ask(self, id: int, values: Mapping[str, Any], position: int | None) -> Asked:
        """`position`: of the row in the input; None: the seed derives from the row's values.

        A value of None is as if the column were missing.
        """
        known = {name: value for name, value in values.items() if value is not None}
        names = {_WHOLE_ROW: dict(values)} | known
        try:
            text = self._prompt.render(names)
            system = None if self._system is None else self._system.render(names)
        except jinja2.UndefinedError as error:
            raise BadRow("missing_column", f"the template needs what the row does not have: {error.message}") from error
        except _RENDER_ERRORS as error:
            raise BadRow("bad_template", f"the template cannot be filled in: {error}") from error
        if self._job.key is not None and self._job.key not in known:
            raise BadRow("missing_column", f"the key '{self._job.key}' is missing")
        key: Any = known[self._job.key] if self._job.key is not None else position
        seed = self.seed(dict(values) if key is None else key)
        return Asked(id, system, text, seed)

    def seed(self, key: Any) -> int:
        """63 bits, the same in every process."""
        return xxhash.xxh3_64_intdigest(key_text([self._job.seed, key])) >> 1

    def read(self, reply: Reply) -> dict[str, Any]:
        """The new columns' values."""
        if reply.wrong is not None:
            raise BadRow(reply.code or "refused", reply.wrong)
        if self._job.schema is None:
            return {self._job.column: reply.text}
        if reply.cut_off:
            raise BadRow("cut_off", "the answer was cut off before its JSON was complete: raise max_tokens")
        try:
            value = json.loads(reply.text)
            if not isinstance(value, dict):
                raise DoesNotFit("the answer is not an object")
            return read_object(self._columns, value)
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_answer", f"the answer does not fit the schema: {error}") from error


def as_json(value: Any) -> Any:
    """Types that Parquet has and JSON has not."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.total_seconds() if isinstance(value, timedelta) else str(value)


def key_text(value: Any) -> bytes:
    """The same for equal values, in every process."""
    return json.dumps(value, default=as_json, sort_keys=True).encode()
