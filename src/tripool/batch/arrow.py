"""Parquet and SQL: chunks of Arrow rows that keep their columns' types. Needs pyarrow, and duckdb for queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    from tripool.batch.job import TablesMissing

    raise TablesMissing("Parquet and SQL need pyarrow", hint="pip install 'tripool[tables]'") from error

from tripool.batch.ask import BadRow
from tripool.batch.columns import Column
from tripool.batch.job import BadTable, TablesMissing
from tripool.batch.rows import CHUNK_ROWS, Chunk, JsonChunk, Row, encode
from tripool.batch.sources import Slice

ROW = "_row"
"""Column of a query's table: the row's number in the input, from 1."""
INFERRED_ROWS = 10_000
_GROUP_BYTES, _GROUP_ROWS = 32 * 2**20, 2**16
_SQL_MEMORY = "1GB"
_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


# ---- chunks --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ArrowChunk:
    """Rows with something wrong are not in the batch."""

    batch: pa.RecordBatch
    rows: Sequence[Row]

    @property
    def num_bytes(self) -> int:
        return int(self.batch.nbytes)

    def records(self) -> Sequence[dict[str, Any]]:
        found = iter(_values(self.batch))
        return [{} if row.wrong else next(found) for row in self.rows]


def chunk_of(batch: pa.RecordBatch, positions: Sequence[int | None], used: Sequence[str] | None) -> ArrowChunk:
    """`used`: columns that are read; None: all."""
    names = batch.schema.names if used is None else [name for name in batch.schema.names if name in used]
    values = _values(batch.select(names)) if names else [{} for _ in range(batch.num_rows)]
    return ArrowChunk(batch, [Row(at, row) for at, row in zip(positions, values, strict=True)])


def empty_chunk(schema: pa.Schema) -> ArrowChunk:
    return ArrowChunk(pa.RecordBatch.from_pylist([], schema=schema), [])


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """As Python has them: times in nanoseconds lose what is below a microsecond."""
    columns = [_microseconds(batch.column(n)) for n in range(batch.num_columns)]
    lists = [column.to_pylist() for column in columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*lists, strict=True)]


def _microseconds(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return column.cast(pa.timestamp("us", kind.tz), safe=False)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return column.cast(pa.duration("us"), safe=False)
    return column.cast(pa.time64("us"), safe=False) if kind == pa.time64("ns") else column


# ---- reading -------------------------------------------------------------------------------------------------------


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowException as error:
        raise BadTable(f"{path} is no Parquet file: {error}", hint="give another file") from error


def parquet_schema(paths: Sequence[str]) -> pa.Schema:
    schema = None
    for path in paths:
        with open_parquet(Path(path)) as file:
            found = file.schema_arrow.remove_metadata()
        if schema is not None and found != schema:
            raise BadTable(f"{path} has other columns than {paths[0]}", hint="run them one by one")
        schema = found
    assert schema is not None
    return schema


def parquet_batches(slices: Iterable[Slice]) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    """Rows with their positions."""
    for part in slices:
        with open_parquet(Path(part.source.path)) as file:
            at, groups, skip = 0, list[int](), 0
            for group in range(file.metadata.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if at + size > part.begin and at < part.end:
                    skip = part.begin - at if not groups else skip
                    groups.append(group)
                at += size
            at, left = part.begin, part.end - part.begin
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=groups):
                dropped, skip = min(skip, batch.num_rows), skip - min(skip, batch.num_rows)
                own = batch.slice(dropped, left)
                if own.num_rows:
                    positions = list(range(part.source.first + at, part.source.first + at + own.num_rows))
                    at, left = at + own.num_rows, left - own.num_rows
                    yield own.replace_schema_metadata(None), positions
                if not left:
                    break


def inferred_schema(chunks: Iterable[JsonChunk]) -> pa.Schema:
    """Of JSON lines, by their first rows. Where two rows disagree, the first one says what the type is."""
    kinds: dict[str, pa.DataType] = {}
    count = 0
    for chunk in chunks:
        for row in chunk.rows:
            if row.wrong is None:
                count += 1
                for name, value in row.values.items():
                    kinds[name] = _wider(kinds.get(name, pa.null()), value)
        if count >= INFERRED_ROWS:
            break
    return pa.schema([pa.field(name, kind) for name, kind in kinds.items()])


def _wider(kind: pa.DataType, value: Any) -> pa.DataType:
    try:
        own = pa.array([value]).type
        if kind == own:
            return kind
        pair = [pa.schema([pa.field("x", one)]) for one in (kind, own)]
        return pa.unify_schemas(pair, promote_options="permissive").field("x").type
    except (pa.ArrowException, OverflowError):
        return kind


def arrow_chunk(chunk: JsonChunk, schema: pa.Schema) -> ArrowChunk:
    """Rows of JSON with the columns' types; those that do not fit are wrong."""
    rows = [row if row.wrong else Row(row.position, row.values, _unfit(row, schema)) for row in chunk.rows]
    good = [dict(row.values) for row in rows if row.wrong is None]
    return ArrowChunk(pa.RecordBatch.from_pylist(good, schema=schema), rows)


def _unfit(row: Row, schema: pa.Schema) -> BadRow | None:
    strange = row.values.keys() - set(schema.names)
    if strange:
        why = f"the first {INFERRED_ROWS} rows have no column '{min(strange)}'"
        return BadRow("bad_type", why)
    try:
        pa.RecordBatch.from_pylist([dict(row.values)], schema=schema)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        return BadRow("bad_type", f"a value does not fit its column: {error}")
    return None


# ---- SQL -----------------------------------------------------------------------------------------------------------


class Query:
    """A query over the rows of one partition. Close it after its last batch."""

    def __init__(
        self, sql: str, batches: Iterable[tuple[pa.RecordBatch, Sequence[int]]], schema: pa.Schema, work: Path
    ):
        try:
            import duckdb
        except ImportError as error:
            raise TablesMissing("SQL needs duckdb", hint="pip install 'tripool[tables]'") from error
        # One thread: the order of groups and joins is then the same in every run.
        config: dict[str, Any] = {"threads": 1, "memory_limit": _SQL_MEMORY, "temp_directory": str(work)}
        self._database = duckdb.connect(":memory:", config=config)
        numbered = pa.schema([*schema, pa.field(ROW, pa.int64())])
        rows = (
            pa.RecordBatch.from_arrays([*batch.columns, pa.array([at + 1 for at in positions])], schema=numbered)
            for batch, positions in batches
        )
        try:
            self._database.register("_input", pa.RecordBatchReader.from_batches(numbered, rows))
            # A table: a query may read it more than once.
            self._database.execute("CREATE TEMP TABLE rows AS SELECT * FROM _input")
            self._database.unregister("_input")
            found = self._database.sql(sql)
            if found is None:
                raise BadTable("the query gives no rows", hint="SELECT some from the table rows", param="sql")
            self._reader = found.to_arrow_reader(CHUNK_ROWS)
            self.has_row = ROW in self._reader.schema.names
            names = [name for name in self._reader.schema.names if name != ROW]
            if len(set(names)) != len(names) or not names:
                raise BadTable("the query gives no column, or two of one name", hint="name them by AS", param="sql")
            self.schema = pa.schema([self._reader.schema.field(name) for name in names])
        except duckdb.Error as error:
            self.close()
            raise BadTable(f"the query fails: {error}", hint="the table is named rows", param="sql") from error
        except BaseException:
            self.close()
            raise

    def batches(self) -> Iterator[tuple[pa.RecordBatch, list[int | None]]]:
        for found in self._reader:
            for begin in range(0, found.num_rows, CHUNK_ROWS):
                batch = found.slice(begin, CHUNK_ROWS)
                numbers = batch.column(ROW).to_pylist() if self.has_row else [None] * batch.num_rows
                positions = [number - 1 if isinstance(number, int) else None for number in numbers]
                yield batch.select(self.schema.names), positions

    def close(self) -> None:
        self._database.close()


# ---- writing -------------------------------------------------------------------------------------------------------


def arrow_type(column: Column) -> pa.DataType:
    if column.kind == "list":
        return pa.list_(arrow_type(column.parts[0]))
    if column.kind == "struct":
        return pa.struct([pa.field(part.name, arrow_type(part)) for part in column.parts])
    return _PLAIN.get(column.kind, pa.string())


class ParquetWriter:
    """Row groups do not depend on when answers came: the same rows give the same bytes."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, columns: Sequence[Column]) -> None:
        new = [pa.field(column.name, arrow_type(column)) for column in columns]
        self._columns, self._new = columns, pa.schema(new)
        self._schema = pa.schema([*schema, *new])
        try:
            self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        except pa.ArrowNotImplementedError as error:
            raise BadTable(f"Parquet cannot hold a column: {error}", hint="CAST it in the query") from error
        self._batches: list[pa.RecordBatch] = []

    def write(self, chunk: Chunk, answers: Sequence[dict[str, Any] | None]) -> None:
        assert isinstance(chunk, ArrowChunk)
        of_batch = [answer for row, answer in zip(chunk.rows, answers, strict=True) if row.wrong is None]
        good = [n for n, answer in enumerate(of_batch) if answer is not None]
        if not good:
            return
        rows = [_stored(self._columns, answer) for answer in of_batch if answer is not None]
        new = pa.RecordBatch.from_pylist(rows, schema=self._new)
        kept = chunk.batch.take(pa.array(good))
        self._batches.append(pa.RecordBatch.from_arrays([*kept.columns, *new.columns], schema=self._schema))
        full = sum(batch.num_rows for batch in self._batches) >= _GROUP_ROWS
        if full or sum(batch.nbytes for batch in self._batches) >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
            self._batches = []


def _stored(columns: Sequence[Column], value: dict[str, Any]) -> dict[str, Any]:
    return {column.name: _stored_value(column, value[column.name]) for column in columns}


def _stored_value(column: Column, value: Any) -> Any:
    """JSON of no single type is kept as its text."""
    if value is None:
        return None
    if column.kind == "json":
        return encode(value).decode().rstrip("\n")
    if column.kind == "list":
        return [_stored_value(column.parts[0], item) for item in value]
    return _stored(column.parts, value) if column.kind == "struct" else value


# ---- rows by hash --------------------------------------------------------------------------------------------------


def spool_batches(
    batches: Iterable[tuple[pa.RecordBatch, Sequence[int]]],
    schema: pa.Schema,
    column: str,
    number_of: Callable[[Any], int],
    paths: Sequence[Path],
) -> list[int]:
    """Write each row to the file of its partition; the rows of each."""
    numbered, counts = pa.schema([*schema, pa.field(ROW, pa.int64())]), [0] * len(paths)
    writers = [pa.ipc.new_stream(str(path), numbered) for path in paths]
    try:
        for batch, positions in batches:
            numbers = [number_of(row[column]) for row in _values(batch.select([column]))]
            whole = pa.RecordBatch.from_arrays([*batch.columns, pa.array(positions, pa.int64())], schema=numbered)
            for number in sorted(set(numbers)):
                own = [n for n, found in enumerate(numbers) if found == number]
                counts[number] += len(own)
                writers[number].write_batch(whole.take(pa.array(own)))
    finally:
        for writer in writers:
            writer.close()
    return counts


def spooled_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    with pa.ipc.open_stream(str(path)) as reader:
        for found in reader:
            yield found.drop_columns([ROW]), found.column(ROW).to_pylist()
