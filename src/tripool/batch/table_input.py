"""The partitions of a table job and their rows: of files, by a hash of a column, through a query."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from tripool.batch.ask import Asker, key_text
from tripool.batch.job import BadTable, Format, TableJob
from tripool.batch.rows import (
    CHUNK_ROWS,
    Chunk,
    JsonChunk,
    JsonWriter,
    Row,
    Writer,
    json_chunks,
    numbered_lines,
)
from tripool.batch.sources import Partition, Sources

if TYPE_CHECKING:
    import pyarrow as pa

    from tripool.batch.arrow import ArrowChunk

_SPOOL = "by_hash"


class TableInput:
    """`work`: a folder for rows by hash and for queries that do not fit in memory. Can be sent to other processes."""

    def __init__(self, job: TableJob, asker: Asker, work: Path) -> None:
        self._job, self._work = job, work
        self._needed, self._new = frozenset(asker.needed), asker.names
        by = job.partition
        self.sources = Sources(job.inputs, by.size if by.kind == "rows" else 0)
        self.format: Format = job.format or self.sources.format
        self.partitions: list[Partition] = []
        """Known once `prepare` was called."""
        self._used = None if asker.whole_row else sorted(asker.used)
        self._schema: pa.Schema | None = None
        if self.sources.format == "parquet" or self.format == "parquet" or job.sql is not None:
            self._schema = self._arrow_schema()
        self._check()

    def described(self) -> list[dict[str, object]]:
        return [source.described() for source in self.sources.files]

    def prepare(self) -> None:
        """Divide the rows. By hash they are written once, each to its partition's file; a later run finds them."""
        by = self._job.partition
        if by.kind != "hash":
            self.partitions = self.sources.partitions(by)
            return
        parted = self._work / _SPOOL
        if not (parted / "counts.json").exists():
            shutil.rmtree(parted, ignore_errors=True)
            part = parted.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            paths = [part / str(number) for number in range(by.size)]
            (part / "counts.json").write_text(json.dumps(self._spool(paths)))
            for source in self.sources.files:
                source.check()
            part.rename(parted)
        counts = json.loads((parted / "counts.json").read_text())
        self.partitions = [Partition(number, (), rows) for number, rows in enumerate(counts)]

    def chunks(self, partition: Partition) -> Generator[Chunk]:
        """With an empty first chunk, so that a partition without rows has columns too."""
        for part in partition.slices:
            part.source.check()
        yield from self._chunks(partition)
        for part in partition.slices:
            part.source.check()

    def writer(self, file: Any, first: Chunk) -> Writer:
        """`first`: any chunk of the partition."""
        if self.format == "jsonl":
            return JsonWriter(file)
        from tripool.batch.arrow import ArrowChunk, ParquetWriter

        assert isinstance(first, ArrowChunk)
        return ParquetWriter(file, first.batch.schema, self._job.columns())

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _chunks(self, partition: Partition) -> Generator[Chunk]:
        if self._schema is None:
            yield JsonChunk([])
            yield from json_chunks(self._lines(partition))
            return
        from tripool.batch.arrow import Query, chunk_of, empty_chunk

        schema, wrong = self._schema, list[Row]()
        batches = self._batches(partition, wrong)
        with ExitStack() as stack:
            if self._job.sql is not None:
                query = Query(self._job.sql, batches, schema, self._work)
                stack.callback(query.close)
                schema, batches = query.schema, query.batches()  # type: ignore[assignment]
                self._check_names(schema.names)
            empty = empty_chunk(schema)
            yield empty
            for batch, positions in batches:
                yield chunk_of(batch, positions, self._used)
                yield from _drained(wrong, empty)
            yield from _drained(wrong, empty)

    def _lines(self, partition: Partition) -> Iterator[tuple[int, bytes]]:
        if self._job.partition.kind != "hash":
            yield from numbered_lines(partition.slices)
            return
        with (self._work / _SPOOL / str(partition.number)).open("rb") as file:
            for line in file:
                position, _, row = line.partition(b" ")
                yield int(position), row

    def _batches(self, partition: Partition, wrong: list[Row]) -> Iterator[tuple[pa.RecordBatch, Sequence[int]]]:
        """Rows of JSON that do not fit go to `wrong`."""
        from tripool.batch.arrow import arrow_chunk, parquet_batches, spooled_batches

        if self.sources.format == "jsonl":
            assert self._schema is not None
            for chunk in json_chunks(self._lines(partition)):
                made = arrow_chunk(chunk, self._schema)
                wrong += [row for row in made.rows if row.wrong is not None]
                good = [row.position for row in made.rows if row.wrong is None and row.position is not None]
                yield made.batch, good
        elif self._job.partition.kind == "hash":
            yield from spooled_batches(self._work / _SPOOL / str(partition.number))
        else:
            yield from parquet_batches(partition.slices)

    def _arrow_schema(self) -> pa.Schema:
        from tripool.batch.arrow import ROW, inferred_schema, parquet_schema

        if self.sources.format == "parquet":
            schema = parquet_schema([source.path for source in self.sources.files])
        else:
            schema = inferred_schema(json_chunks(numbered_lines(self.sources.whole())))
        twice = [name for name in schema.names if schema.names.count(name) > 1]
        if twice:
            raise BadTable(f"the input has two columns '{twice[0]}'", hint="rename one of them")
        if ROW in schema.names:
            raise BadTable(f"the input has a column '{ROW}'", hint="rename it: queries find the row's number there")
        return schema

    def _check(self) -> None:
        """What can be known of the columns before a run."""
        if self._schema is not None:
            names, by = self._schema.names, self._job.partition
            if by.kind == "hash" and by.column not in names:
                raise BadTable(f"there is no column '{by.column}'", hint=_known(names), param="partition")
            if self._job.sql is None:
                self._check_names(names)
        else:
            first = next(json_chunks(numbered_lines(self.sources.whole())))
            found = next((row for row in first.rows if row.wrong is None), None)
            if found is not None:
                self._check_new(list(found.values))

    def _check_names(self, names: Sequence[str]) -> None:
        missing = self._needed - set(names)
        if missing:
            raise BadTable(
                f"there is no column '{min(missing)}', which a template or the key needs", hint=_known(names)
            )
        self._check_new(names)

    def _check_new(self, names: Sequence[str]) -> None:
        twice = set(self._new) & set(names)
        if twice:
            hint = "name the answer's by --column or in the schema, or rename the input's by a query"
            raise BadTable(f"the input has a column '{min(twice)}' already", hint=hint)

    def _spool(self, paths: Sequence[Path]) -> list[int]:
        by = self._job.partition

        def number_of(value: Any) -> int:
            return xxhash.xxh3_64_intdigest(key_text(value)) % by.size

        if self.sources.format == "parquet":
            from tripool.batch.arrow import parquet_batches, spool_batches

            assert self._schema is not None
            batches = parquet_batches(self.sources.whole())
            return spool_batches(batches, self._schema, by.column, number_of, paths)
        counts = [0] * by.size
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for position, line in numbered_lines(self.sources.whole()):
                (row,) = next(json_chunks([(position, line)])).rows
                number = number_of(row.values.get(by.column))
                counts[number] += 1
                files[number].write(b"%d %s\n" % (position, line.rstrip(b"\r\n")))
        return counts


def _drained(wrong: list[Row], empty: ArrowChunk) -> Iterator[Chunk]:
    if wrong:
        from tripool.batch.arrow import ArrowChunk

        rows = list(wrong)
        wrong.clear()
        for begin in range(0, len(rows), CHUNK_ROWS):
            yield ArrowChunk(empty.batch, rows[begin : begin + CHUNK_ROWS])


def _known(names: Sequence[str]) -> str:
    return f"columns: {', '.join(names[:20])}"
