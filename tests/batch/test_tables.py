"""Tables of JSON lines through a model: rows, answers, partitions, bad rows, resumption, servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch.tables import OPTIONS, PROMPT, answers, bad_rows, questions, run, whole, with_bad_ones, write_lines, written
from gateway.serving import DEADLINE_S, WatchedEngine, running_server
from tripool.batch import LocalModel, Partitioning, ServedModel, TableJob, run_table
from tripool.batch.answerers import LocalAnswerer
from tripool.batch.ask import Asker
from tripool.batch.job import Asked, BadTable, OtherRun, Reply
from tripool.batch.table import TableRun
from tripool.config import AdmissionConfig
from tripool.core import SamplingParams, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import InvalidRequest, TripoolError
from tripool.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


def test_a_row_gets_the_answer_that_it_would_have_alone(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(300))
    done = run(path, tmp_path / "out", system="You are {{ id }}.", sampling=OPTIONS)
    assert (done.rows, done.bad, done.partitions, done.resumed) == (300, 0, 1, 0)
    found = answers(tmp_path / "out")
    assert [row["id"] for row in found] == list(range(300))
    job = TableJob(inputs=(str(path),), out="x", prompt=PROMPT, system="You are {{ id }}.", sampling=OPTIONS)
    with LLM(PagedFake(fake_text())) as llm:
        for at in (0, 7, 299):
            talk = [{"role": "system", "content": f"You are {at}."}, {"role": "user", "content": f"Say: Question {at}"}]
            (alone,) = llm.chat(talk, SamplingParams(seed=Asker(job).seed(at), **OPTIONS))
            assert found[at] == {"id": at, "text": f"Question {at}", "answer": alone.text}


@pytest.mark.parametrize("partition", ["rows:7", "rows:100", "files", "hash:text:5"])
def test_partitions_change_no_answer(tmp_path: Path, partition: str) -> None:
    (tmp_path / "in").mkdir()
    rows = with_bad_ones(200, 20)
    write_lines(tmp_path / "in/a.jsonl", [*rows[:65], "", ""])
    write_lines(tmp_path / "in/b.jsonl", rows[65:])
    write_lines(tmp_path / "in/_c.jsonl", rows)
    run(tmp_path / "in", tmp_path / "one", partition=Partitioning.parse("rows:100000"))
    done = run(f"{tmp_path}/in/[a-z].jsonl", tmp_path / "other", partition=Partitioning.parse(partition))
    assert (done.rows, done.bad) == (190, 10)
    key = lambda row: (row["file"], row["row"]) if "file" in row else row["id"]  # noqa: E731
    for kind in (answers, bad_rows):
        assert sorted(kind(tmp_path / "other"), key=key) == sorted(kind(tmp_path / "one"), key=key)
    if not partition.startswith("hash"):
        assert written(tmp_path / "other") == written(tmp_path / "one")


def test_bad_rows_are_named_and_stop_nothing(tmp_path: Path) -> None:
    rows: list[Any] = questions(9)
    rows[1], rows[3], rows[5] = "{", {"id": 3}, {"id": 5, "text": None}
    rows[6] = {"id": 6, "text": "word " * 3000}
    rows[7] = '{"id": 7, "text": "\\ud800"}'
    done = run(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out")
    assert (done.rows, done.bad) == (4, 5)
    assert [row["id"] for row in answers(tmp_path / "out")] == [0, 2, 4, 8]
    found = bad_rows(tmp_path / "out")
    assert [(row["file"], row["row"], row["code"]) for row in found] == [
        ("in.jsonl", 2, "bad_row"),
        ("in.jsonl", 4, "missing_column"),
        ("in.jsonl", 6, "missing_column"),
        ("in.jsonl", 7, "context_length_exceeded"),
        ("in.jsonl", 8, "bad_row"),
    ]
    assert "'text' is undefined" in found[1]["reason"] and "maximum context length" in found[3]["reason"]


def test_a_schema_becomes_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(20))
    done = run(path, tmp_path / "out", schema=SCHEMA, sampling={"max_tokens": 60})
    assert done.rows + done.bad == 20 and done.rows > 10
    for row in answers(tmp_path / "out"):
        assert list(row) == ["id", "text", "city", "size"]
        assert isinstance(row["city"], str) and isinstance(row["size"], int) and 0 <= row["size"] <= 99
    run(path, tmp_path / "short", schema=SCHEMA, sampling={"max_tokens": 2})
    assert {row["code"] for row in bad_rows(tmp_path / "short")} == {"cut_off"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "not an object"),
        ('{"city": "a"}', "'size' is missing"),
        ('{"city": "a", "size": true}', "'size' is not of type integer"),
        ('{"city": "a", "size": 9223372036854775808}', "'size' is not of type integer"),
        ('{"city": "a", "size": 1, "more": 1}', "'more' is not in the schema"),
        ('{"city": null, "size": 1}', "'city' is null"),
    ],
)
def test_an_answer_that_does_not_fit_its_columns_is_a_bad_row(text: str, why: str) -> None:
    from tripool.batch.ask import BadRow

    asker = Asker(TableJob(inputs=("in",), out="out", prompt="x", schema=SCHEMA))
    assert asker.read(Reply(0, '{"size": 2.0, "city": "a"}')) == {"city": "a", "size": 2}
    with pytest.raises(BadRow, match=why):
        asker.read(Reply(0, text))


def test_equal_keys_have_equal_answers(tmp_path: Path) -> None:
    rows = [{"text": "the same", "who": n % 2} for n in range(4)]
    path = write_lines(tmp_path / "in.jsonl", rows)
    run(path, tmp_path / "by_key", key="who")
    first, second, *rest = [row["answer"] for row in answers(tmp_path / "by_key")]
    assert first != second and rest == [first, second]
    run(path, tmp_path / "by_place")
    assert len({row["answer"] for row in answers(tmp_path / "by_place")}) == 4
    run(path, tmp_path / "seeded", seed=1)
    assert answers(tmp_path / "seeded") != answers(tmp_path / "by_place")


def test_a_finished_run_is_not_run_again_and_another_one_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(30))
    by = Partitioning.parse("rows:10")
    run(path, tmp_path / "out", partition=by)
    before = whole(tmp_path / "out")
    assert run(path, tmp_path / "out", partition=by).resumed == 3
    (tmp_path / "out/_done/part-00001.json").unlink()
    (tmp_path / "out/part-00001.jsonl").unlink()
    assert run(path, tmp_path / "out", partition=by).resumed == 2
    assert whole(tmp_path / "out") == before
    for fields, what in (
        ({"seed": 1}, "seed"),
        ({"prompt": "{{ id }}"}, "prompt"),
        ({"partition": Partitioning()}, "partition"),
    ):
        with pytest.raises(OtherRun, match=f"other {what}"):
            run(path, tmp_path / "out", **({"partition": by} | fields))
    write_lines(path, questions(31))
    with pytest.raises(OtherRun, match="other input"):
        run(path, tmp_path / "out", partition=by)
    with pytest.raises(OtherRun, match="holds other files"):
        run(path, tmp_path)


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(3))
    inside: list[str] = []

    class Nested:
        name = "fake"

        def open(self, job: TableJob) -> Any:
            with pytest.raises(OtherRun, match="another run"):
                run_table(job, self)
            inside.append("refused")
            raise InvalidRequest("enough")

    with pytest.raises(InvalidRequest, match="enough"):
        run_table(TableJob(inputs=(str(path),), out=str(tmp_path / "out"), prompt="{{ text }}"), Nested())
    assert inside == ["refused"]


class Held:
    """Answers every row but the first, and that one when nothing else is left."""

    name = "held"

    def __init__(self, at_once: int) -> None:
        self.at_once, self.open_ids, self.most, self.ahead = at_once, list[int](), 0, 0

    def open(self, job: TableJob) -> Held:
        return self

    def submit(self, asked: Asked) -> None:
        self.open_ids.append(asked.id)
        self.most = max(self.most, len(self.open_ids))
        self.ahead = max(self.ahead, asked.id - self.open_ids[0])

    def wait(self) -> list[Reply]:
        found = self.open_ids[1:] or self.open_ids[:1]
        self.open_ids = [id for id in self.open_ids if id not in found]
        return [Reply(id, "x") for id in found]

    def close(self) -> None:
        pass


def test_rows_in_memory_are_bounded(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(5000))
    model = Held(at_once=8)
    job = TableJob(inputs=(str(path),), out=str(tmp_path / "out"), prompt="x")
    assert run_table(job, model).rows == 5000
    assert model.most <= 8 and model.ahead < 1024


def refuses(http: httpx.Client) -> bool:
    return 'requests_refused_total{code="overloaded"' in http.get("/metrics").text


class Overloaded(WatchedEngine):
    """Computes nothing until the server has refused a request."""

    refused: Callable[[], bool] = staticmethod(lambda: False)

    def step(self) -> list[TokenEvent]:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.refused():
            assert time.monotonic() < deadline_s, "no request was refused"
        self.refused = lambda: True
        return super().step()


def test_a_server_gives_the_answers_of_the_model(tmp_path: Path) -> None:
    """Though it refuses requests that are too many, and is asked for more than it queues."""
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(60, 15))
    for fields in ({}, {"schema": SCHEMA, "sampling": {"max_tokens": 60}}, {"complete": True}):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        local = run(path, out / "local", **fields)
        admission = AdmissionConfig(queue_tokens=150)
        engine = Overloaded(max_running=4)
        with running_server(engine=engine, admission=admission) as server:
            engine.refused = partial(refuses, server.http)
            given: dict[str, Any] = {"prompt": PROMPT, "sampling": OPTIONS} | fields
            job = TableJob(inputs=(str(path),), out=str(out / "served"), **given)
            assert run_table(job, ServedModel(server.server.url, at_once=16)) == local
            assert refuses(server.http)
        assert written(out / "served") == written(out / "local")
        places = [[(row["file"], row["row"]) for row in bad_rows(out / kind)] for kind in ("local", "served")]
        assert places[0] == places[1]


def test_what_every_row_would_be_refused_for_ends_the_run(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(3))
    hard = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}
    with pytest.raises(TripoolError, match="not"):
        run(path, tmp_path / "a", schema=hard)
    with running_server() as server:
        url = server.server.url
        job = TableJob(inputs=(str(path),), out=str(tmp_path / "b"), prompt="{{ text }}")
        with pytest.raises(InvalidRequest, match="answers 404"):
            run_table(job, ServedModel(url, "no-such-model"))
        job = TableJob(inputs=(str(path),), out=str(tmp_path / "c"), prompt="{{ text }}", schema=hard)
        with pytest.raises(InvalidRequest, match="answers 400"):
            run_table(job, ServedModel(url))
    with pytest.raises(TripoolError, match="cannot reach"):
        ServedModel(url)


BAD_JOBS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "{{ text "}, "is no template"),
    ({"inputs": ("nowhere",)}, "there is no input nowhere"),
    ({"inputs": ("in.csv",)}, "neither Parquet nor JSON lines"),
    ({"inputs": ("empty.jsonl",)}, "there are no rows"),
    ({"column": "text"}, "has a column 'text' already"),
    ({"schema": {"type": "string"}}, "not of an object"),
    ({"sampling": {"n": 2}}, "'n' is no option"),
    ({"sampling": {"temperature": -1}}, "temperature is -1"),
    ({"complete": True, "system": "x"}, "no system message"),
]


@pytest.mark.parametrize(("fields", "says"), BAD_JOBS, ids=[says for _, says in BAD_JOBS])
def test_a_job_that_cannot_work_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.jsonl", "in.csv"):
        write_lines(tmp_path / name, questions(2))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    given: dict[str, Any] = {"inputs": ("in.jsonl",), "prompt": "{{ text }}", "out": "out"} | fields
    with pytest.raises(TripoolError, match=says):
        run_table(TableJob(**given), LocalModel("there-is-no-such-model"))


@pytest.mark.parametrize("text", ["rows", "rows:0", "files:2", "hash:a", "hash::3", "hash:a:300", "by:3"])
def test_what_is_no_partitioning_is_refused(text: str) -> None:
    with pytest.raises(BadTable, match="is no partitioning"):
        Partitioning.parse(text)


def test_a_failed_row_is_a_bad_row() -> None:
    class Failing(PagedFake):
        failed = False

        def take_failed(self) -> list[str]:
            found = [] if self.failed else ["row 0"]
            self.failed = True
            return found

    job = TableJob(inputs=("in",), out="out", prompt="x", sampling=OPTIONS)
    with LLM(Failing(fake_text())) as llm:
        answerer = LocalAnswerer(llm, job, at_once=2)
        for id in (0, 1):
            answerer.submit(Asked(id, None, "hello", 1))
        replies = [*answerer.wait(), *answerer.wait()]
    assert [(reply.id, reply.wrong is None) for reply in replies] == [(0, False), (1, True)]


def test_the_command_line(tripool: Callable[..., Any], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(60, 30))
    (tmp_path / "prompt.txt").write_text(PROMPT)
    asked = ("--in", str(path), "--prompt", f"@{tmp_path}/prompt.txt", "--max-tokens", "6", "--partition", "rows:20")
    ran = tripool("batch", "fake", "--out", str(tmp_path / "out"), *asked)
    assert (ran.code, ran.out, ran.err) == (0, "58 rows answered, 2 bad, in 3 partitions\n", "")
    run(path, tmp_path / "python")
    assert written(tmp_path / "out") == written(tmp_path / "python")
    again = tripool("batch", "fake", "--out", str(tmp_path / "out"), *asked)
    assert again.out == "58 rows answered, 2 bad, in 3 partitions, 3 of them from before\n"
    other = tripool("batch", "fake", "--out", str(tmp_path / "out"), *asked, "--seed", "4")
    assert other.code == 2 and "a run with other seed" in other.err
    assert "no model is named" in tripool("batch", "--out", "x", *asked).err
    assert "not JSON" in tripool("batch", "fake", "--out", "x", *asked, "--schema", "{").err
    with running_server(engine=WatchedEngine()) as server:
        ran = tripool("batch", "--url", server.server.url, "--out", str(tmp_path / "served"), *asked)
        assert ran.code == 0, ran.err
    assert written(tmp_path / "served") == written(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert manifest["model"] == "fake" and manifest["input"][0]["rows"] == 60


class Slow:
    """A model that answers one row at a time, and notes how much is read and not written."""

    name, at_once = "slow", 4

    def __init__(self, then: Callable[[int], object] = lambda count: None) -> None:
        self._then, self._asked, self._ended = then, list[Asked](), 0

    def open(self, job: TableJob) -> Slow:
        return self

    def submit(self, asked: Asked) -> None:
        self._asked.append(asked)

    def wait(self) -> list[Reply]:
        self._ended += 1
        self._then(self._ended)
        return [Reply(self._asked.pop(0).id, "yes")]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("partition", ["rows:10", "files"])
def test_an_input_that_is_changed_during_the_run_ends_it(tmp_path: Path, partition: str) -> None:
    """Lines would come twice or be lost, and no later run could tell. What was finished before is kept."""
    path = write_lines(tmp_path / "in.jsonl", questions(40))
    before = path.read_bytes()
    job = TableJob(
        inputs=(str(path),), out=str(tmp_path / "out"), prompt="{{ text }}", partition=Partitioning.parse(partition)
    )
    with pytest.raises(BadTable, match="changed or removed"):
        run_table(job, Slow(lambda count: write_lines(path, questions(41)) if count == 15 else None))
    finished = len(list((tmp_path / "out/_done").iterdir()))
    assert finished == (1 if partition == "rows:10" else 0)
    with pytest.raises(OtherRun, match="input"):
        run_table(job, Slow())
    path.write_bytes(before)
    done = run_table(job, Slow())
    assert (done.rows, done.resumed) == (40, finished)
    again = TableJob(inputs=(str(path),), out=str(tmp_path / "gone"), prompt="{{ text }}", partition=job.partition)
    with pytest.raises(BadTable, match="changed or removed"):
        run_table(again, Slow(lambda count: path.unlink(missing_ok=True)))


def test_large_rows_are_not_read_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.batch.rows.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("tripool.batch.table._AHEAD_BYTES", 50_000)
    most, bad = 0, '{"text": 1e999999, "x": "' + "x" * 4000 + '"'
    rows = [bad if n % 3 else {"text": "x" * 4000} for n in range(120)]
    path = write_lines(tmp_path / "in.jsonl", rows)
    begin = TableRun._begin

    def watched(self: TableRun, found: Any) -> bool:
        nonlocal most
        most = max(most, self._num_bytes)
        return begin(self, found)

    monkeypatch.setattr(TableRun, "_begin", watched)
    done = run_table(TableJob(inputs=(str(path),), out=str(tmp_path / "out"), prompt="{{ text }}"), Slow())
    assert (done.rows, done.bad) == (40, 80)
    assert most < 50_000 + 2 * 16_000
