"""Reads a trace from a file, folder or archive, in whichever known format it is."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from gzip import GzipFile
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from tripool.bench.trace import TRACE_BLOCK_TOKENS, BadTrace, TraceRequest, parse_object, parse_trace
from tripool.simulate.traces import draw_clients, mean_rate, parse_azure, parse_clients
from tripool.simulate.traces import formats as known
from tripool.simulate.traces.lmcache import PIECE_CHARS, TextTrace
from tripool.simulate.traces.ragpulse import Lengths, parse_length, parse_prompt, to_requests
from tripool.simulate.traces.weka import Sessions

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    max_requests: int | None = None
    """The first ones only."""
    rate: float | None = None
    """Requests per second to which the trace is stretched."""
    seed: int = 0
    """Of what is drawn: ServeGen's requests, starts of WEKA's sessions."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Mooncake: tokens that share a hash id."""
    begin_s: float = 36000.0
    length_s: float = 3600.0
    """ServeGen: which part of its week."""
    sessions_per_minute: float = 1.0
    """WEKA: sessions that start."""
    tokenizer: str = "tiny"
    """LMCache: a model's name or folder."""


@dataclass(frozen=True, slots=True)
class Trace:
    kind: str
    requests: Callable[[], Iterable[TraceRequest]]
    """In order of arrival; called for each pass, and only WEKA's are read again."""
    facts: dict[str, str] = field(default_factory=dict)
    """What was drawn, inferred or left out; complete after the first pass."""

    @property
    def notes(self) -> list[str]:
        return [f"{self.kind} trace: {each}" for each in self.facts.values()]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    open: Callable[[], BinaryIO]

    @contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Its contents; uncompressed, if it is a gzip file."""
        with self.open() as raw:
            is_gzip = raw.read(2) == _GZIP
            raw.seek(0)
            yield cast(BinaryIO, GzipFile(fileobj=raw)) if is_gzip else raw

    def head(self) -> bytes:
        with self.stream() as opened:
            return opened.read(known.HEAD_BYTES)

    def text(self, start: int = 0, length: int = -1) -> str:
        with self.stream() as opened:
            opened.seek(start)
            return _decoded(opened.read(length), self.name)

    def lines(self) -> Iterator[str]:
        with self.stream() as opened:
            for number, line in enumerate(opened, 1):
                yield _decoded(line, f"line {number}")

    def objects(self) -> list[tuple[int, int, str]]:
        """(start, length, what it is called) of each JSON object: of the whole file, or one per line."""
        with self.stream() as opened:
            first = opened.readline()
            if not (first.rstrip().endswith(b"}") and opened.readline().lstrip().startswith(b"{")):
                return [(0, -1, self.name)]
            opened.seek(0)
            found, start = [], 0
            for number, line in enumerate(opened, 1):
                if line.strip():
                    found.append((start, len(line), f"{self.name}, line {number}"))
                start += len(line)
            return found


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadTrace(f"{where} is not UTF-8: {error.reason}", hint="a trace is UTF-8 text") from None


def read_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    options = options or TraceOptions()
    with _named(path):
        files = list(_files(path))
        by_kind: dict[str, list[_File]] = {}
        for file in files:
            kind = known.recognise(file.name, file.head())
            if kind is not None:
                by_kind.setdefault(kind, []).append(file)
        trace = _parse(by_kind, files, options)
    if options.rate is not None and trace.kind != known.SERVEGEN:
        trace = _stretched(trace, options.rate)
    return replace(trace, requests=lambda: _checked(path, trace.requests()))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the trace's path to what is wrong with it."""
    try:
        yield
    except BadTrace as error:
        raise BadTrace(f"{path}: {error.message}", hint=error.hint) from None
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadTrace(f"cannot read {path}: {reason}", hint=f"give {known.EXPECTED}") from None


def _checked(path: Path, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Sessions are read during a pass."""
    with _named(path):
        is_empty = True
        for request in requests:
            is_empty = False
            yield request
        if is_empty:
            raise BadTrace("the trace holds no requests", hint=known.EXPECTED)


def _files(path: Path) -> Iterator[_File]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                yield _on_disk(str(file.relative_to(path)), file)
    elif path.is_file() and tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is not None:
                    yield _File(member.name, partial(BytesIO, opened.read()))
    else:
        yield _on_disk(path.name, path)


def _on_disk(name: str, path: Path) -> _File:
    return _File(name, lambda: path.open("rb"))


def _parse(by_kind: dict[str, list[_File]], files: list[_File], options: TraceOptions) -> Trace:
    kinds = by_kind.keys() - {known.RAGPULSE_LENGTHS}
    if not kinds:
        said = known.foreign(files[0].head()) if len(files) == 1 else f"{len(files)} files, none of them a trace"
        raise BadTrace(f"the format is not known: {said}", hint=known.EXPECTED)
    if len(kinds) > 1:
        raise BadTrace(f"files of several formats: {', '.join(sorted(kinds))}", hint="give one of them")
    (kind,) = kinds
    own = by_kind[kind]
    if len(own) > 1 and kind in (known.MOONCAKE, known.AZURE, known.RAGPULSE):
        names = ", ".join(file.name for file in own[:3])
        raise BadTrace(f"{len(own)} traces with clocks and ids of their own: {names}", hint="give one of them")
    if kind == known.SERVEGEN:
        return _clients(own, options)
    if kind == known.WEKA:
        return _sessions(own, options)
    if kind == known.LMCACHE:
        return _texts(own, options)
    if kind == known.RAGPULSE:
        return _components(own[0], by_kind.get(known.RAGPULSE_LENGTHS, []), options)
    if kind == known.AZURE:
        found = parse_azure(own[0].lines(), max_requests=options.max_requests)
    else:
        lines = own[0].lines()
        found = parse_trace(lines, block_tokens=options.block_tokens, max_requests=options.max_requests)
    return Trace(kind, lambda: found)


def _clients(files: list[_File], options: TraceOptions) -> Trace:
    clients = parse_clients({file.name: file.text() for file in files})
    scale = 1.0
    if options.rate is not None:
        usual = mean_rate(clients, options.begin_s, options.length_s)
        scale = options.rate / usual if usual else 1.0
    drawn = draw_clients(clients, seed=options.seed, begin_s=options.begin_s, length_s=options.length_s, scale=scale)
    found = list(islice(drawn, options.max_requests))
    if not found:
        raise BadTrace("there are no requests at that time", hint="--begin and --length choose the time")
    said = (
        f"{len(clients):,} clients drawn with seed {options.seed}, {options.length_s:g} s from {options.begin_s:g} s on"
    )
    return Trace(known.SERVEGEN, lambda: found, {"drawn": said})


def _sessions(files: list[_File], options: TraceOptions) -> Trace:
    places = [(file, *each) for file in files for each in file.objects()]

    def load(place: int) -> tuple[dict[str, Any], str]:
        file, start, length, where = places[place]
        return parse_object(file.text(start, length), where), where

    sessions = Sessions(len(places), load, options.sessions_per_minute, options.seed)
    facts = {
        "starts": f"{len(places):,} sessions, {options.sessions_per_minute:g} started per minute (drawn with seed "
        f"{options.seed}); ids are those of a session unless their scope is global"
    }

    def requests() -> Iterator[TraceRequest]:
        yield from islice(sessions, options.max_requests)
        if sessions.num_unanswered:
            facts["unanswered"] = f"{sessions.num_unanswered:,} requests without an answer are left out"

    return Trace(known.WEKA, requests, facts)


def _texts(files: list[_File], options: TraceOptions) -> Trace:
    from tripool.checkpoints import open_checkpoint  # here: slow to import, and seldom needed
    from tripool.text import Tokenizer

    with open_checkpoint(options.tokenizer) as checkpoint:
        tokenizer, name = Tokenizer(checkpoint.text), checkpoint.name

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text.encode("utf-8", "replace").decode(), special=False)  # half a pair is a ?

    texts = TextTrace(encode)
    many = len(files) > 1
    lines = (
        (f"{file.name}, line {number}" if many else f"line {number}", line)
        for file in files
        for number, line in enumerate(file.lines(), 1)
    )
    found = texts.parse(lines, max_requests=options.max_requests)
    if not found:
        raise BadTrace("the trace holds no requests with an answer", hint="lines with timestamp, input and output")
    facts = {"tokenizer": f"lengths by the tokenizer of {name}, line by line (at most {PIECE_CHARS:,} characters)"}
    if texts.num_unanswered:
        facts["unanswered"] = f"{texts.num_unanswered:,} requests without an answer are left out"
    return Trace(known.LMCACHE, lambda: found, facts)


def _components(file: _File, tables: list[_File], options: TraceOptions) -> Trace:
    rows = ((f"line {number}", line) for number, line in enumerate(file.lines(), 1) if line.strip())
    prompts = [parse_prompt(line, where) for where, line in islice(rows, options.max_requests)]
    published = dict(
        parse_length(line, f"{table.name}, line {number}")
        for table in tables
        for number, line in enumerate(table.lines(), 1)
        if line.strip()
    )
    lengths = Lengths(prompts, published)
    found = to_requests(prompts, lengths)
    said = (
        f"{lengths.num_components:,} components; lengths of {lengths.num_published:,} are in tables beside the trace, "
        f"{lengths.num_inferred:,} follow from prompts that share them, {lengths.num_unknown:,} remain unknown and are "
        "estimated from the sums"
    )
    return Trace(known.RAGPULSE, lambda: found, {"lengths": said})


def _stretched(trace: Trace, rate: float) -> Trace:
    count, last_s = 0, 0.0
    for request in trace.requests():
        count, last_s = count + 1, request.arrival_s
    if count < 2 or last_s <= 0:
        return trace
    scale = (count - 1) / last_s / rate
    return replace(
        trace, requests=lambda: (replace(each, arrival_s=each.arrival_s * scale) for each in trace.requests())
    )
