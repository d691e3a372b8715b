"""The input of a table job: finds its files, says what is in them, and divides their rows into partitions.

Every file is read once before a run: its hash says whether a later run continues this one, and of JSON lines the places
where partitions begin are noted. Positions count rows over all files in the order of their names; of JSON lines they
count lines, so that a position tells file and line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import xxhash

from tripool.batch.job import MAX_PARTITIONS, SUFFIXES, BadTable, Format, Partitioning

MAX_ROW_BYTES = 16 * 2**20
"""Of a line. A longer one is a bad row."""
_READ = 2**20


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file of JSON lines where a partition begins."""

    line: int
    """From 0."""
    offset: int
    num_rows: int
    """Lines before it that are not blank."""


@dataclass(frozen=True, slots=True)
class Source:
    path: str
    format: Format
    num_bytes: int
    digest: str
    first: int
    """Position of its first row."""
    num_positions: int
    num_rows: int
    stamp: tuple[int, int]
    """Size and time of change when it was read."""
    marks: tuple[Mark, ...] = ()

    def check(self) -> None:
        """Raises if the file is not the one that was read at first: rows would be missing, or come twice."""
        try:
            same = _stamp(Path(self.path)) == self.stamp
        except OSError:
            same = False
        if not same:
            hint = "give it back its content and run it again, or begin anew in another folder"
            raise BadTable(f"{self.path} was changed or removed during the run", hint=hint)

    def described(self) -> dict[str, object]:
        return {"file": Path(self.path).name, "bytes": self.num_bytes, "xxh3": self.digest, "rows": self.num_rows}


@dataclass(frozen=True, slots=True)
class Slice:
    """Successive positions of one file."""

    source: Source
    begin: int
    """In the file, from 0."""
    end: int
    offset: int = 0
    """Of its first byte, in JSON lines."""


@dataclass(frozen=True, slots=True)
class Partition:
    number: int
    slices: tuple[Slice, ...]
    num_rows: int


class Sources:
    """All input files, which are of one format."""

    def __init__(self, names: Sequence[str], mark_every: int) -> None:
        """`mark_every`: rows of a partition; 0: partitions begin with files only."""
        self.files: list[Source] = []
        paths = find_files(names)
        self.format: Format = SUFFIXES[paths[0].suffix]
        for path in paths:
            if SUFFIXES[path.suffix] != self.format:
                raise BadTable(f"{path} is not {self.format}, as {paths[0]} is", hint="give files of one format")
            first = self.files[-1].first + self.files[-1].num_positions if self.files else 0
            read = _read_lines if self.format == "jsonl" else _read_parquet
            try:
                self.files.append(read(path, first, mark_every))
            except OSError as error:
                raise BadTable(f"cannot read {path}: {error.strerror}", hint="give another file") from error
        self.num_rows = sum(source.num_rows for source in self.files)
        if not self.num_rows:
            raise BadTable(f"there are no rows in {', '.join(map(str, paths[:3]))}", hint="give a file with rows")

    def place(self, position: int) -> tuple[str, int]:
        """File and number, from 1, of a row."""
        source = self.files[bisect_right([source.first for source in self.files], position) - 1]
        return Path(source.path).name, position - source.first + 1

    def whole(self) -> tuple[Slice, ...]:
        return tuple(Slice(source, 0, source.num_positions) for source in self.files)

    def partitions(self, by: Partitioning) -> list[Partition]:
        """By rows or by files."""
        assert by.kind != "hash"
        if by.kind == "files":
            return [
                Partition(n, (Slice(source, 0, source.num_positions),), source.num_rows)
                for n, source in enumerate(self.files)
            ]
        end = self.files[-1].first + self.files[-1].num_positions
        if end > MAX_PARTITIONS * by.size:
            raise BadTable(f"{end} rows make too many partitions", hint="give more rows to each", param="partition")
        made: list[Partition] = []
        for begin in range(0, end, by.size):
            slices, num_rows = [], 0
            for source in self.files:
                low = max(begin, source.first) - source.first
                high = min(begin + by.size - source.first, source.num_positions)
                if low < high:
                    mark, next_rows = _marks(source, low, high)
                    slices.append(Slice(source, low, high, mark.offset))
                    num_rows += next_rows - mark.num_rows
            made.append(Partition(len(made), tuple(slices), num_rows))
        return made


def find_files(names: Sequence[str]) -> list[Path]:
    """Files as named, in folders and by patterns; each once, in the order of their paths."""
    found: set[Path] = set()
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = {one for one in path.iterdir() if one.suffix in SUFFIXES and one.is_file()}
            own = {one for one in inside if not one.name.startswith(("_", "."))}
        else:
            own = {path} if path.is_file() else {Path(one) for one in glob(name) if Path(one).is_file()}
        if not own:
            raise BadTable(f"there is no input {name}", hint="a file, a folder or a pattern", param="inputs")
        for one in own:
            if one.suffix not in SUFFIXES:
                hint = f"known endings: {', '.join(SUFFIXES)}"
                raise BadTable(f"{one} is neither Parquet nor JSON lines", hint=hint, param="inputs")
        found |= own
    return sorted(found)


def _read_lines(path: Path, first: int, mark_every: int) -> Source:
    stamp, digest, marks = _stamp(path), xxhash.xxh3_64(), [Mark(0, 0, 0)]
    lines = rows = offset = 0
    begins, blank = True, True
    with path.open("rb") as file:
        while part := file.readline(_READ):  # a long line comes in parts
            if begins and mark_every and (first + lines) % mark_every == 0 and lines:
                marks.append(Mark(lines, offset, rows))
            digest.update(part)
            offset += len(part)
            blank = blank and not part.strip()
            begins = part.endswith(b"\n")
            if begins:
                lines, rows, blank = lines + 1, rows + (not blank), True
    if not begins:
        lines, rows = lines + 1, rows + (not blank)
    return Source(str(path), "jsonl", offset, digest.hexdigest(), first, lines, rows, stamp, tuple(marks))


def _read_parquet(path: Path, first: int, mark_every: int) -> Source:
    from tripool.batch.arrow import open_parquet

    stamp, digest, size = _stamp(path), xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while part := file.read(_READ):
            digest.update(part)
            size += len(part)
    with open_parquet(path) as parquet:
        rows = parquet.metadata.num_rows
    return Source(str(path), "parquet", size, digest.hexdigest(), first, rows, rows, stamp)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _marks(source: Source, low: int, high: int) -> tuple[Mark, int]:
    """Where position `low` of the file is, and how many rows there are before position `high`."""
    if source.format == "parquet":
        return Mark(low, 0, low), high
    at = bisect_right(source.marks, low, key=lambda mark: mark.line) - 1
    assert source.marks[at].line == low, "partitions begin at marks"
    following = source.marks[at + 1 :]
    return source.marks[at], following[0].num_rows if following else source.num_rows
