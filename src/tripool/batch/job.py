"""A job over a table: which rows are read, what is asked about each, and how its answer becomes columns. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tripool.batch.columns import Column, column_of
from tripool.core import SamplingParams, Structure
from tripool.errors import InvalidRequest, TripoolError

Format = Literal["parquet", "jsonl"]
SUFFIXES: Mapping[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
MAX_PARTITIONS = 1_000_000
MAX_HASH_PARTITIONS = 256
_OWN_OPTIONS = {
    "n": "a row has one answer",
    "seed": "the job has a seed, from which those of its rows derive",
    "structure": "give the job a schema",
    "logprobs": "answers become columns of text",
    "prompt_logprobs": "answers become columns of text",
}


class BadTable(InvalidRequest, code="bad_table"):
    """The input of a table job, or what it asks for, cannot be used; nothing was run."""


class OtherRun(TripoolError, status=409, code="other_run"):
    """The output folder holds a run with other input, another model or other parameters, or one that is under way."""


class TablesMissing(TripoolError, status=501, code="tables_missing"):
    """A package is needed that comes with the extra `tables` or `ray`."""


@dataclass(frozen=True, slots=True)
class Partitioning:
    kind: Literal["rows", "files", "hash"] = "rows"
    size: int = 1000
    """Rows of a partition, or how many partitions there are by hash."""
    column: str = ""
    """Whose hash says which partition a row belongs to."""

    @classmethod
    def parse(cls, text: str) -> Partitioning:
        """`rows:1000`, `files` or `hash:COLUMN:16`."""
        kind, _, rest = text.partition(":")
        column, _, count = rest.rpartition(":")
        if kind == "files" and not rest:
            return cls("files", 0)
        if kind == "rows" and rest.isdecimal() and 0 < int(rest) < 10**9:
            return cls("rows", int(rest))
        if kind == "hash" and column and count.isdecimal() and 0 < int(count) <= MAX_HASH_PARTITIONS:
            return cls("hash", int(count), column)
        hint = f"rows:COUNT, files, or hash:COLUMN:COUNT with at most {MAX_HASH_PARTITIONS}"
        raise BadTable(f"'{text}' is no partitioning", hint=hint, param="partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableJob:
    inputs: tuple[str, ...]
    """Files (`.parquet`, `.jsonl`, `.ndjson`), folders of them, or patterns such as `in/*.jsonl`."""
    out: str
    """A folder; a run that was stopped or killed goes on in it."""
    prompt: str
    """Of the user: a Jinja template over the row's columns; `row` is all of them."""
    system: str | None = None
    """The same, as a system message."""
    complete: bool = False
    """Go on from the prompt as bare text, without the model's chat template."""
    schema: Mapping[str, Any] | None = None
    """A JSON schema of an object: its properties become typed columns."""
    column: str = "answer"
    """Of the answer's text, without a schema."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Options of `SamplingParams`, the same for all rows."""
    seed: int = 0
    key: str | None = None
    """A column: equal keys get equal seeds. None: a row's seed derives from its position in the input."""
    sql: str | None = None
    """A query over the table `rows`, run on each partition; column `_row` is the row's number in the input."""
    partition: Partitioning = Partitioning()
    format: Format | None = None
    """Of the output; None: that of the input."""

    def __post_init__(self) -> None:
        for name, why in _OWN_OPTIONS.items():
            if name in self.sampling:
                raise BadTable(f"'{name}' is no option of a table", hint=why, param=name)
        if not self.inputs:
            raise BadTable("no input is named", hint="give a file, a folder or a pattern")
        if self.complete and self.system is not None:
            raise BadTable("bare text has no system message", hint="write it into the prompt", param="system")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise BadTable(f"the seed is {self.seed!r}", hint="must be a whole number of 64 bits", param="seed")
        self.params()
        self.columns()

    def params(self, seed: int | None = None) -> SamplingParams:
        structure = None if self.schema is None else Structure("json_schema", self.schema, param="schema")
        return SamplingParams.from_options({**self.sampling, "structure": structure, "seed": seed})

    def columns(self) -> tuple[Column, ...]:
        """That the answers add."""
        if self.schema is None:
            return (Column(self.column, "string"),)
        properties = self.schema.get("properties")
        if self.schema.get("type") != "object" or not isinstance(properties, Mapping) or not properties:
            hint = 'like {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
            raise BadTable("the schema is not of an object with properties", hint=hint, param="schema")
        return tuple(column_of(name, node, self.schema) for name, node in properties.items())

    def described(self) -> dict[str, Any]:
        """What determines the output besides input and model, for the manifest."""
        names = ("prompt", "system", "complete", "schema", "column", "sampling", "seed", "key", "sql", "format")
        own = {name: getattr(self, name) for name in names}
        by = self.partition
        return own | {"partition": {"kind": by.kind, "size": by.size, "column": by.column}}


@dataclass(frozen=True, slots=True)
class Asked:
    """One row, ready for the model."""

    id: int
    system: str | None
    text: str
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a row: a text, or why there is none."""

    id: int
    text: str = ""
    cut_off: bool = False
    """The answer reached `max_tokens` or the end of the context."""
    wrong: str | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a finished run, with what earlier runs in the same folder had done."""

    rows: int
    """Rows answered; they are in the output."""
    bad: int
    """Rows in the side files."""
    partitions: int
    resumed: int
    """Partitions that were there already."""
