"""Maps a table through a model: rows stream in, are answered many at once, and stream out, partition by partition.

At any time a bounded number of rows is read and not yet written. Rows of the next partition begin while the last rows
of one are under way, so that the end of a partition leaves no worker idle. A row's request depends on the row and its
position or key alone, and rows are written in the order of the input: neither partitions nor workers nor a
restart change an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from tripool.batch.answerers import Answerer, Model
from tripool.batch.ask import Asker, BadRow
from tripool.batch.job import Reply, Summary, TableJob
from tripool.batch.out_folder import OutFolder, writing
from tripool.batch.rows import CHUNK_ROWS, Chunk, Row, Writer, encode
from tripool.batch.sources import Partition
from tripool.batch.table_input import TableInput

_AHEAD = 4
"""Rows read and not written, per row under way: an answer may take many times as long as those of its neighbours."""
_AHEAD_BYTES = 64 * 2**20
"""Of rows as they were read; beyond it no more are read while any is under way."""

OnRows = Callable[[int], None]
"""Called with how many more rows of the input are done."""
OnProgress = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class _OpenChunk:
    chunk: Chunk
    answers: list[dict[str, Any] | None]
    bad: list[tuple[int, BadRow]] = field(default_factory=list)
    left: int = 0
    """Rows under way."""
    is_read: bool = False


@dataclass(slots=True, eq=False)
class _OpenPartition:
    partition: Partition
    chunks: deque[_OpenChunk] = field(default_factory=deque)
    is_read: bool = False
    writer: Writer | None = None
    file: BinaryIO | None = None
    bad_file: BinaryIO | None = None
    rows: int = 0
    bad: int = 0


class TableRun:
    """Runs partitions of one job, in one process."""

    def __init__(
        self, job: TableJob, given: TableInput, asker: Asker, folder: OutFolder, answerer: Answerer,
        on_rows: OnRows = lambda count: None,
    ) -> None:  # fmt: skip
        self._job, self._input, self._asker, self._folder = job, given, asker, folder
        self._answerer, self._on_rows = answerer, on_rows
        self._partitions: deque[_OpenPartition] = deque()
        self._under_way: dict[int, tuple[_OpenPartition, _OpenChunk, int]] = {}
        self._num_read = 0
        """Rows in open chunks."""
        self._num_bytes = 0
        self._next_id = 0

    def run(self, partitions: Sequence[Partition]) -> None:
        """Every file that this opens is closed when it returns, finished or not."""
        most = max(_AHEAD * self._answerer.at_once, 2 * CHUNK_ROWS)
        with closing(self._rows(partitions)) as rows:
            try:
                more = True
                while more or self._under_way:
                    while more and len(self._under_way) < self._answerer.at_once and self._may_read(most):
                        more = self._begin(next(rows, None))
                    self._settle()
                    if self._under_way:
                        for reply in self._answerer.wait():
                            self._end(reply)
                        self._settle()
            finally:
                for one in self._partitions:
                    for file in (one.file, one.bad_file):
                        if file is not None:
                            with suppress(OSError):
                                file.close()

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _may_read(self, most_rows: int) -> bool:
        return not self._under_way or (self._num_read < most_rows and self._num_bytes < _AHEAD_BYTES)

    def _rows(self, partitions: Sequence[Partition]) -> Generator[tuple[_OpenPartition, _OpenChunk, int]]:
        """Each row, with where its answer belongs."""
        for partition in partitions:
            one = _OpenPartition(partition)
            self._partitions.append(one)
            with closing(self._input.chunks(partition)) as chunks:
                for chunk in chunks:
                    opened = _OpenChunk(chunk, [None] * len(chunk.rows))
                    one.chunks.append(opened)
                    self._num_bytes += chunk.num_bytes
                    for at in range(len(chunk.rows)):
                        self._num_read += 1
                        yield one, opened, at
                    opened.is_read = True
                    self._settle()  # all of its rows may be bad
            one.is_read = True

    def _begin(self, found: tuple[_OpenPartition, _OpenChunk, int] | None) -> bool:
        """Ask about a row; False: there are no more."""
        if found is None:
            return False
        _, chunk, at = found
        row = chunk.chunk.rows[at]
        try:
            if row.wrong is not None:
                raise row.wrong
            asked = self._asker.ask(self._next_id, row.values, row.position)
        except BadRow as wrong:
            chunk.bad.append((at, wrong))
            self._told()
            return True
        self._under_way[self._next_id] = found
        self._next_id += 1
        chunk.left += 1
        self._answerer.submit(asked)
        return True

    def _end(self, reply: Reply) -> None:
        _, chunk, at = self._under_way.pop(reply.id)
        chunk.left -= 1
        try:
            chunk.answers[at] = self._asker.read(reply)
        except BadRow as wrong:
            chunk.bad.append((at, wrong))
        self._told()

    def _told(self) -> None:
        """A query's rows are not those of the input: then a partition counts when it is finished."""
        if self._job.sql is None:
            self._on_rows(1)

    # ---- files ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Write what is complete, of each partition in order."""
        for one in list(self._partitions):
            while one.chunks and one.chunks[0].is_read and not one.chunks[0].left:
                self._write(one, one.chunks.popleft())
            if one.is_read and not one.chunks:
                self._finish(one)
                self._partitions.remove(one)

    def _write(self, one: _OpenPartition, chunk: _OpenChunk) -> None:
        number = one.partition.number
        with writing(self._folder.path):
            if one.writer is None:
                one.file = self._folder.unfinished(number, "rows").open("wb")
                one.writer = self._input.writer(one.file, chunk.chunk)
            one.writer.write(chunk.chunk, chunk.answers)
            for at, wrong in sorted(chunk.bad, key=lambda entry: entry[0]):
                if one.bad_file is None:
                    one.bad_file = self._folder.unfinished(number, "bad").open("wb")
                row = chunk.chunk.rows[at]
                place = self._place(number, one.rows + one.bad + at, row)
                one.bad_file.write(encode(place | {"code": wrong.code, "reason": wrong.reason}))
        good, bad = len(chunk.answers) - len(chunk.bad), len(chunk.bad)
        one.rows, one.bad = one.rows + good, one.bad + bad
        self._num_read -= len(chunk.answers)
        self._num_bytes -= chunk.chunk.num_bytes

    def _place(self, partition: int, at: int, row: Row) -> dict[str, Any]:
        if row.position is None:
            return {"partition": partition, "result_row": at + 1}
        name, number = self._input.sources.place(row.position)
        return {"file": name, "row": number}

    def _finish(self, one: _OpenPartition) -> None:
        number = one.partition.number
        with writing(self._folder.path):
            assert one.writer is not None and one.file is not None
            one.writer.close()
            one.file.close()
            if one.bad_file is not None:
                one.bad_file.close()
        bad = None if one.bad_file is None else self._folder.unfinished(number, "bad")
        counts = {"rows": one.rows, "bad": one.bad}
        self._folder.finish(number, self._input.format, self._folder.unfinished(number, "rows"), bad, counts)
        if self._job.sql is not None:
            self._on_rows(one.partition.num_rows)


class Job:
    """A job in its folder, ready to be run: what all ways of running it have in common."""

    def __init__(self, job: TableJob, model: Model, on_progress: OnProgress | None) -> None:
        self.job, self.model, self._on_progress = job, model, on_progress
        self.asker, self.folder = Asker(job), OutFolder(job.out)

    @contextmanager
    def open(self) -> Iterator[list[Partition]]:
        """Check the input, lock the folder, begin or continue the run: the partitions that are left to do."""
        with self.folder.locked():
            self.input = TableInput(self.job, self.asker, self.folder.work)
            self.folder.begin({"input": self.input.described(), "model": self.model.name, **self.job.described()})
            with writing(self.folder.path):
                self.input.prepare()
            done = self.folder.finished()
            self.resumed = len(done)
            rest = [one for one in self.input.partitions if one.number not in done]
            self._total = sum(one.num_rows for one in self.input.partitions)
            self._ready = self._total - sum(one.num_rows for one in rest)
            self.tell(0)
            yield rest
            self.folder.end()

    def tell(self, count: int) -> None:
        """So many more rows of the input are done."""
        self._ready += count
        if self._on_progress is not None:
            self._on_progress(self._ready, self._total)

    def summary(self) -> Summary:
        done = self.folder.finished().values()
        rows, bad = (sum(one[name] for one in done) for name in ("rows", "bad"))
        return Summary(rows, bad, len(done), self.resumed)


def run_table(job: TableJob, model: Model, *, on_progress: OnProgress | None = None) -> Summary:
    """Begin or continue a job in this process. `on_progress` is called with the rows that are done, and all.

    The model is opened once the input was found good: it takes time to load.
    """
    one = Job(job, model, on_progress)
    with one.open() as rest:
        if rest:
            with closing(model.open(job)) as answerer:
                TableRun(job, one.input, one.asker, one.folder, answerer, one.tell).run(rest)
    return one.summary()
