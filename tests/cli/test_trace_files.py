"""Traces on disk: every format is recognised by its content, in files, folders and archives; the rest is refused."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.supernode.test_runs import DEPLOYMENT
from tripool.bench.trace import BadTrace, TraceRequest, measure_trace
from tripool.cli.trace_files import TraceOptions, read_trace
from tripool.simulate.rng import Rng

MOONCAKE = [{"timestamp": 1000 * n, "input_length": 700, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(4)]
RAGPULSE = [
    {"timestamp": str(80 + n), "input_length": 3000 + n, "output_length": 20, "session_id": "s",
     "hash_ids": {"sys_prompt": [8, 9], "passages_ids": [70, 71], "history": [], "web_search": [], "user_input": [n]}}
    for n in range(4)
]  # fmt: skip
LMCACHE = [
    {"timestamp": 1760428436442742 + 10**6 * n, "input": "You are an agent.\n" * 40 * (n + 1), "output": "Yes, I am."}
    for n in range(4)
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:17:0{n},30,3\n" for n in range(4))


def session(number: int) -> dict[str, Any]:
    requests = [{"t": 2.0 * n, "type": "n", "in": 200 + n, "out": 7, "hash_ids": [1, 2, 3]} for n in range(2)]
    return {"id": f"trace_{number}", "block_size": 64, "hash_id_scope": "local", "requests": requests}


def jsonl(records: list[Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


def read(path: Path, **options: Any) -> list[TraceRequest]:
    return list(read_trace(path, TraceOptions(**options)).requests())


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("Mooncake", jsonl(MOONCAKE)),
        ("RAGPulse", jsonl(RAGPULSE)),
        ("LMCache", jsonl(LMCACHE)),
        ("Azure", AZURE),
        ("WEKA", jsonl([session(0), session(1)])),
    ],
)
def test_a_format_is_known_by_its_content_whatever_the_file_is_called(kind: str, content: str, tmp_path: Path) -> None:
    plain, packed, marked = tmp_path / "trace", tmp_path / "trace.txt", tmp_path / "trace.data"
    plain.write_text(content, "utf-8")
    packed.write_bytes(gzip.compress(content.encode()))
    marked.write_text("\ufeff" + content, "utf-8")
    trace = read_trace(plain)
    found = list(trace.requests())
    assert trace.kind == kind and len(found) == 4 and found[0].arrival_s == 0.0
    assert found == read(packed) == read(marked) == list(trace.requests())
    assert read(plain, max_requests=2) == found[:2] or kind == "RAGPulse"
    faster = read(plain, rate=50.0)
    assert [each.block_ids for each in faster] == [each.block_ids for each in found]
    assert faster[-1].arrival_s == pytest.approx(3 / 50.0)


def test_a_folder_or_archive_of_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "README.md").write_text("what this is", "utf-8")
    for number in range(5):
        (folder / f"trace_{number}.json").write_text(json.dumps(session(number), indent=2), "utf-8")
    with tarfile.open(tmp_path / "sessions.tar.gz", "w:gz") as archive:
        archive.add(folder, "sessions")
    found = read(folder, sessions_per_minute=30.0, seed=4)
    assert len(found) == 10 and measure_trace(found).cached_block_share == pytest.approx(0.5)
    assert found == read(tmp_path / "sessions.tar.gz", sessions_per_minute=30.0, seed=4)
    assert found[-1].arrival_s > read(folder, sessions_per_minute=300.0, seed=4)[-1].arrival_s
    (note,) = read_trace(folder).notes
    assert note.startswith("WEKA trace: 5 sessions, 1 started per minute")


def test_requests_without_an_answer_are_noted_after_a_pass(tmp_path: Path) -> None:
    record = session(0)
    record["requests"][0]["out"] = 0
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(record), "utf-8")
    trace = read_trace(file)
    assert len(list(trace.requests())) == 1 and "1 requests without an answer" in trace.notes[-1]


def test_ragpulse_says_how_many_lengths_are_unknown_and_takes_published_ones(tmp_path: Path) -> None:
    (tmp_path / "0_trace.jsonl").write_text(jsonl(RAGPULSE), "utf-8")
    (note,) = read_trace(tmp_path / "0_trace.jsonl").notes
    assert "8 components" in note and "0 follow from prompts that share them, 8 remain unknown" in note
    (tmp_path / "1_sys_prompt.jsonl").write_text(
        jsonl([{"sys_prompt_id": 8, "token_length": 512}, {"sys_prompt_id": 9, "token_length": 88}]), "utf-8"
    )
    (tmp_path / "2_passages.jsonl").write_text(
        jsonl([{"passage_id": 70, "token_length": 1000}, {"passage_id": 71, "token_length": 1000}]), "utf-8"
    )
    trace = read_trace(tmp_path)
    assert "lengths of 4 are in tables" in trace.notes[0] and "4 follow" in trace.notes[0]
    one, two, *_ = trace.requests()
    assert one.block_ids[: 2600 // 64] == two.block_ids[: 2600 // 64] and one.block_ids[40] != two.block_ids[40]


def test_texts_are_counted_by_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(jsonl(LMCACHE[number::2]), "utf-8")
    trace = read_trace(tmp_path)
    found = list(trace.requests())
    assert "the tokenizer of tiny" in trace.notes[0] and len(found) == 4
    assert found[1].input_tokens == 2 * found[0].input_tokens > 100
    assert measure_trace(found).cached_share > 0.5


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "the format is not known: empty"),
        (b"time,in,out\n1,2,3\n", "a file that begins with 'time,in,out'"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b'[{"timestamp": 0}]', "a JSON array"),
        (b'{"question": "why"}', "not known"),
        (jsonl(MOONCAKE).encode() + b'{"timestamp": 1, \xff}\n', "line 5 is not UTF-8"),
        (jsonl([*MOONCAKE, {"timestamp": 5}]).encode(), "line 5: input_length is None"),
        (jsonl([session(0), {"block_size": 64}]).encode(), "trace, line 2: requests is no list"),
        (b'{"block_size": 64, "requests": [}', "trace is not JSON"),
        (b'{"block_size": 64, "requests": []}', "holds no requests"),
        (gzip.compress(jsonl(MOONCAKE).encode())[:60], "cannot read"),
    ],
)
def test_what_is_no_trace_is_said_in_words(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(content)
    with pytest.raises(BadTrace) as refused:
        read(file)
    assert str(file) in refused.value.message and told in refused.value.message and refused.value.hint


def test_a_folder_is_one_trace(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot read"):
        read(tmp_path / "nowhere")
    with pytest.raises(BadTrace, match="0 files, none of them a trace"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_text(jsonl(MOONCAKE), "utf-8")
    (tmp_path / "b.jsonl").write_text(jsonl(MOONCAKE), "utf-8")
    with pytest.raises(BadTrace, match=r"2 traces with clocks and ids of their own: a\.jsonl"):
        read(tmp_path)
    (tmp_path / "b.jsonl").write_text(AZURE, "utf-8")
    with pytest.raises(BadTrace, match="several formats: Azure, Mooncake"):
        read(tmp_path)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.prove)])
def test_damaged_files_are_read_or_refused_by_a_typed_error(tmp_path: Path, count: int) -> None:
    """Files with one changed, added or missing piece."""
    rng, file, refused = Rng(11), tmp_path / "trace", 0
    good = [jsonl(MOONCAKE), jsonl(RAGPULSE), jsonl(LMCACHE[:2]), AZURE, json.dumps(session(0))]
    pieces = ["", "{", "}", "[", '"', "-1", "1e999", "null", "\n", "\x00", "true", "NaN", "9" * 30, ",", "\ud800"]
    for number in range(count):
        text = good[number % len(good)]
        at = rng.between(0, len(text) - 1)
        changed = text[:at] + rng.pick(pieces) + text[at + rng.between(0, 3) :]
        file.write_bytes(changed.encode("utf-8", "surrogatepass"))
        try:
            assert read(file)
        except BadTrace:
            refused += 1
    assert 0.2 * count < refused < 0.9 * count


@pytest.mark.parametrize(
    "content",
    [
        jsonl(RAGPULSE),
        pytest.param(jsonl(LMCACHE), marks=pytest.mark.prove),
        pytest.param(jsonl([session(0), session(1)]), marks=pytest.mark.prove),
        pytest.param(AZURE, marks=pytest.mark.prove),
    ],
)
@pytest.mark.prove
def test_every_command_reads_every_format(tripool, content: str, tmp_path: Path) -> None:
    file, deployment, report = tmp_path / "trace", tmp_path / "deployment.toml", tmp_path / "run.json"
    file.write_text(content, "utf-8")
    deployment.write_text(DEPLOYMENT, "utf-8")
    ran = tripool("simulate", "--trace", str(file), "--deployment", str(deployment), "--json", str(report))
    assert ran.code == 0, ran.err
    data = json.loads(report.read_text("utf-8"))
    assert data["requests"]["done"] == 4
    is_azure = content == AZURE
    assert (data["hits"]["cache pool"] is None) == is_azure and ("not in this trace" in ran.out) == is_azure
    assert bool(data["notes"]) != is_azure
    ideal = tripool("simulate", "--trace", str(file), "--ideal")
    assert "4 requests in" in ideal.out and ("not in this trace" in ideal.out) == is_azure
    assert tripool("plan", "--trace", str(file), "--chips", "64").code == 0
