"""Tables of Parquet, and queries over partitions."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch.tables import answers, bad_rows, questions, run, whole, with_bad_ones, write_lines
from tripool.batch import Partitioning
from tripool.batch.columns import column_of
from tripool.batch.job import BadTable


def every_type(count: int) -> pa.Table:
    """With nulls, and with what Python's own types cannot hold: nanoseconds."""
    numbers = list(range(count))
    holes = [None if n % 5 == 4 else n for n in numbers]
    return pa.table(
        {
            "text": [f"Question {n}" for n in numbers],
            "i8": pa.array([hole and hole % 128 for hole in holes], pa.int8()),
            "u64": pa.array([2**64 - 1 - n for n in numbers], pa.uint64()),
            "f32": pa.array([n / 3 for n in numbers], pa.float32()),
            "flag": pa.array([None if n % 5 == 4 else n % 2 == 0 for n in numbers]),
            "raw": pa.array([bytes([n % 256, 0, 255]) for n in numbers]),
            "money": pa.array([Decimal(n).scaleb(-2) for n in numbers], pa.decimal128(12, 2)),
            "day": pa.array([date(2026, 1, 1)] * count),
            "when": pa.array([n * 10**9 + 1 for n in numbers], pa.timestamp("ns", "Europe/Berlin")),
            "span": pa.array([n + 1 for n in numbers], pa.duration("ns")),
            "names": pa.array([["a", None], None, []] * count, pa.list_(pa.large_string())).slice(0, count),
            "place": pa.array([{"x": n, "y": None} for n in numbers], pa.struct({"x": pa.int16(), "y": pa.string()})),
            "map": pa.array([[("k", n)] for n in numbers], pa.map_(pa.string(), pa.int32())),
            "kind": pa.array(["a", "b", "a"] * count).slice(0, count).dictionary_encode(),
        }
    )


@pytest.mark.parametrize("partition", ["rows:70", "files", "hash:text:3"])
def test_types_survive(tmp_path: Path, partition: str) -> None:
    table = every_type(150)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    pq.write_table(table, tmp_path / "b.parquet")
    done = run(f"{tmp_path}/[ab].parquet", tmp_path / "out", partition=Partitioning.parse(partition))
    assert (done.rows, done.bad) == (300, 0)
    found = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))])
    assert found.schema == pa.schema([*table.schema, pa.field("answer", pa.string())])
    whole_input = pa.concat_tables([table, table]).combine_chunks()
    if not partition.startswith("hash"):
        assert found.drop_columns(["answer"]).combine_chunks().equals(whole_input)
    run(f"{tmp_path}/[ab].parquet", tmp_path / "lines", format="jsonl")
    lines = {(row["text"], row["answer"]) for row in answers(tmp_path / "lines")}
    assert {(row["text"], row["answer"]) for row in found.select(["text", "answer"]).to_pylist()} == lines
    first = answers(tmp_path / "lines")[1]
    assert (first["money"], first["day"], first["raw"], first["u64"]) == ("0.01", "2026-01-01", "AQD/", 2**64 - 2)


def test_lines_become_parquet_and_what_does_not_fit_is_bad(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "a", "n": 1, "tags": ["x"]}, {"text": "b", "n": 2.5, "tags": None}, {"text": "c"}]
    rows += ["{", {"text": "d", "n": "three"}, {"text": "e", "n": 4}]
    run(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out", format="parquet")
    found = pq.read_table(tmp_path / "out/part-00000.parquet")
    assert found.schema.types == [pa.string(), pa.float64(), pa.list_(pa.string()), pa.string()]
    assert found.select(["text", "n", "tags"]).to_pylist() == [
        {"text": "a", "n": 1.0, "tags": ["x"]},
        {"text": "b", "n": 2.5, "tags": None},
        {"text": "c", "n": None, "tags": None},
        {"text": "e", "n": 4.0, "tags": None},
    ]
    assert [(row["row"], row["code"]) for row in bad_rows(tmp_path / "out")] == [(4, "bad_row"), (5, "bad_type")]


def test_answers_have_the_types_of_the_schema(tmp_path: Path) -> None:
    properties = {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "share": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "any": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    path = write_lines(tmp_path / "in.jsonl", questions(12))
    for format in ("parquet", "jsonl"):
        done = run(path, tmp_path / format, schema=schema, sampling={"max_tokens": 400}, format=format)
        assert done.rows > 6
    found = pq.read_table(tmp_path / "parquet/part-00000.parquet")
    kinds = [pa.int64(), pa.float64(), pa.string(), pa.list_(pa.bool_()), pa.struct({"x": pa.int64()}), pa.string()]
    assert found.select([*properties]).schema.types == kinds
    rows = [row | {"any": None if row["any"] is None else json.loads(row["any"])} for row in found.to_pylist()]
    assert rows == answers(tmp_path / "jsonl")


def test_columns_of_schemas() -> None:
    def kind(node: Any) -> tuple[str, bool]:
        column = column_of("x", node, {"required": ["x"]})
        return column.kind, column.nullable

    assert kind({"type": ["null", "string"]}) == ("string", True)
    assert kind({"enum": ["a", None]}) == ("string", True)
    assert kind({"const": "a"}) == ("string", False)
    for node in (True, {}, {"type": ["string", "integer"]}, {"$ref": "#/x"}, {"enum": ["a", 1]}, {"type": "object"}):
        assert kind(node)[0] == "json"
    assert kind({"type": "array"})[0] == "json" and kind({"type": "array", "items": {}})[0] == "list"


@pytest.mark.parametrize("partition", ["rows:64", "hash:id:3", "files"])
def test_a_query_chooses_and_makes_rows(tmp_path: Path, partition: str) -> None:
    path = write_lines(tmp_path / "in.jsonl", with_bad_ones(200, 50))
    query = "SELECT id, upper(text) AS text, _row FROM rows WHERE id % 2 = 0 AND length(text) < 100 ORDER BY id DESC"
    by = Partitioning.parse(partition)
    for format in ("jsonl", "parquet"):
        done = run(path, tmp_path / format, sql=query, partition=by, format=format)
        assert (done.rows, done.bad) == (100, 2), "rows that are no JSON are bad, those without a text are not chosen"
    found = {row["id"]: row for row in answers(tmp_path / "jsonl")}
    assert list(next(iter(found.values()))) == ["id", "text", "answer"] and found[42]["text"] == "QUESTION 42"
    parquet = pa.concat_tables([pq.read_table(one) for one in sorted((tmp_path / "parquet").glob("*.parquet"))])
    assert sorted(parquet.to_pylist(), key=lambda row: row["id"]) == [found[key] for key in sorted(found)]


def test_a_query_may_join_and_count(tmp_path: Path) -> None:
    rows = [{"who": f"w{n % 3}", "text": f"t{n}"} for n in range(30)]
    path = write_lines(tmp_path / "in.jsonl", rows)
    query = (
        "SELECT a.who, string_agg(a.text, ' ' ORDER BY a._row) AS text, count(*) AS n FROM rows a "
        "JOIN (SELECT DISTINCT who FROM rows) b ON a.who = b.who GROUP BY a.who ORDER BY a.who"
    )
    for out, by in (("one", "files"), ("two", "hash:who:2")):
        run(path, tmp_path / out, sql=query, partition=Partitioning.parse(by))
        assert {(row["who"], row["n"]) for row in answers(tmp_path / out)} == {("w0", 10), ("w1", 10), ("w2", 10)}
    by_who = [{row["who"]: row["answer"] for row in answers(tmp_path / out)} for out in ("one", "two")]
    assert by_who[0] == by_who[1], "a row that has no position has a seed by what it says"


def test_a_run_of_parquet_gives_the_same_bytes_again(tmp_path: Path) -> None:
    pq.write_table(every_type(120), tmp_path / "in.parquet")
    fields: dict[str, Any] = {
        "partition": Partitioning("rows", 50),
        "sql": "SELECT * EXCLUDE span FROM rows WHERE i8 IS NOT NULL",
    }
    run(tmp_path / "in.parquet", tmp_path / "out", **fields)
    before = whole(tmp_path / "out")
    (tmp_path / "out/_done/part-00002.json").unlink()
    run(tmp_path / "in.parquet", tmp_path / "out", **fields)
    assert whole(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sql": "SELECT"}, "the query fails"),
        ({"sql": "SELECT nothing FROM rows"}, "the query fails"),
        ({"sql": " "}, "the query gives no rows"),
        ({"sql": "SELECT 1 AS a, 2 AS a"}, "two of one name"),
        ({"sql": "SELECT id FROM rows"}, "there is no column 'text'"),
        ({"sql": "SELECT text, id AS answer FROM rows"}, "has a column 'answer' already"),
        ({"sql": "SELECT text, INTERVAL 1 DAY AS a FROM rows", "format": "parquet"}, "cannot hold a column"),
        ({"prompt": "{{ nothing }}", "format": "parquet"}, "there is no column 'nothing'"),
        ({"key": "nothing", "format": "parquet"}, "there is no column 'nothing'"),
        ({"partition": Partitioning("hash", 2, "nothing"), "format": "parquet"}, "there is no column 'nothing'"),
    ],
)
def test_what_the_columns_do_not_allow_is_said(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(5))
    with pytest.raises(BadTable, match=says):
        run(path, tmp_path / "out", **fields)


def test_a_column_may_be_optional(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", questions(3))
    prompt = "{{ text }}{% if more is defined %} {{ more }}{% endif %}{{ other | default('') }} {{ row['id'] }}"
    assert run(path, tmp_path / "out", prompt=prompt, format="parquet").rows == 3


def test_files_that_are_no_parquet_or_of_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(BadTable, match="no Parquet file"):
        run(tmp_path / "a.parquet", tmp_path / "out")
    for name, column in (("b", "text"), ("c", "words")):
        pq.write_table(pa.table({column: ["x"]}), tmp_path / f"{name}.parquet")
    with pytest.raises(BadTable, match="other columns"):
        run(f"{tmp_path}/[bc].parquet", tmp_path / "out")
