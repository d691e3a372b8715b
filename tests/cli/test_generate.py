"""Files in, files out."""

from __future__ import annotations

import json

import pytest

from tripool import LLM, SamplingParams
from tripool.core import TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def oracle():
    with LLM(PagedFake(fake_text())) as llm:
        yield llm


def test_plain_lines(tripool, tmp_path, oracle):
    prompts = ["first prompt", "second: é", "third"]
    (tmp_path / "in.txt").write_text("first prompt\n\nsecond: é\r\nthird")
    ran = tripool(
        "generate", "fake", "--prompts", f"{tmp_path}/in.txt", "--out", f"{tmp_path}/out.jsonl", "--seed", "5"
    )
    assert (ran.code, ran.out) == (0, "")
    wants = oracle.generate(prompts, SamplingParams(seed=5))
    for row, want in zip(rows(tmp_path / "out.jsonl"), wants, strict=True):
        assert row == {
            "text": want.text,
            "token_ids": list(want.token_ids),
            "finish_reason": want.finish_reason,
            "usage": {
                "prompt_tokens": want.usage.prompt_tokens,
                "completion_tokens": want.usage.completion_tokens,
                "cached_tokens": 0,
                "accepted_draft_tokens": 0,
            },
        }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.jsonl"]


def test_json_lines_with_their_own_options(tripool, tmp_path, oracle):
    chat = [{"role": "user", "content": "hello"}]
    lines = [
        {"prompt": "a", "max_tokens": 3},
        {"messages": chat, "n": 2, "seed": 9},
        {"prompt": oracle.tokenizer.encode("a"), "logit_bias": {"5": 1}, "stop": "x", "logprobs": 1, "max_tokens": 2},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.jsonl", "--out", str(out), "--seed", "5")
    assert ran.code == 0
    first, second, third = rows(out)
    assert first["text"] == oracle.generate("a", SamplingParams(seed=5, max_tokens=3))[0].text
    (want,) = oracle.chat(chat, SamplingParams(seed=9, n=2))
    assert [choice["text"] for choice in second["choices"]] == [choice.text for choice in want.choices]
    assert second["text"] == want.text
    assert third["token_ids"] == first["token_ids"][:2]
    assert len(third["logprobs"]) == 2


BAD_LINES = [
    ("{", "not valid JSON"),
    ("[]", "send an object"),
    ('{"max_tokens": 3}', "either 'prompt' or 'messages'"),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "either 'prompt' or 'messages'"),
    ('{"prompt": ["a", "b"]}', "several prompts"),
    ('{"prompt": "a", "temprature": 1}', "unknown parameter 'temprature'"),
    ('{"prompt": "a", "temperature": "hot"}', "'temperature' must be a number"),
    ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
    ('{"messages": [{"role": "user"}]}', "no content"),
    (json.dumps({"prompt": "x" * 5000}), "the prompt has"),
    ('{"prompt": ""}', "empty"),
]


@pytest.mark.parametrize(("line", "says"), BAD_LINES, ids=[says for _, says in BAD_LINES])
def test_a_bad_line_is_named_and_nothing_is_written(tripool, tmp_path, line, says):
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.jsonl", "--out", str(out))
    assert ran.code == 2
    (error,) = (text for text in ran.err.splitlines() if text.startswith("error:"))
    assert says in error
    assert "line 3" in error
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("in.txt", b"\n \n", "holds no prompts"),
        ("in.txt", b"ok\n\xff\n", "line 2: is not UTF-8"),
        (None, b"", "cannot read"),
    ],
)
def test_bad_files(tripool, tmp_path, models, name, content, says):
    if name:
        (tmp_path / name).write_bytes(content)
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/{name}", "--out", f"{tmp_path}/out.jsonl")
    assert ran.code == 2
    assert says in ran.err
    assert not models.loaded


def test_no_folder_for_the_answers(tripool, tmp_path, models):
    (tmp_path / "in.txt").write_text("a")
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.txt", "--out", f"{tmp_path}/no/out.jsonl")
    assert ran.code == 2
    assert "there is no folder" in ran.err
    assert not models.loaded


def test_the_answers_cannot_replace_a_folder(tripool, tmp_path):
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "out").mkdir()
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.txt", "--out", f"{tmp_path}/out")
    assert ran.code == 2
    assert "cannot write" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


class InterruptedEngine(PagedFake):
    def step(self) -> list[TokenEvent]:
        raise KeyboardInterrupt


def test_interrupt_writes_nothing(tripool, tmp_path, models, monkeypatch):
    engine = InterruptedEngine(fake_text())
    monkeypatch.setattr(models, "load", lambda model, config: engine)
    (tmp_path / "in.txt").write_text("a\nb\n")
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.txt", "--out", f"{tmp_path}/out.jsonl")
    assert ran.code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
    assert not engine.open_requests


def test_lines_with_a_structure(tripool, tmp_path):
    lines = [
        {"prompt": "a", "structure": {"choice": ["yes", "no"]}},
        {"messages": [{"role": "user", "content": "hello"}], "structure": {"json_schema": {"type": "object"}}},
        {"prompt": "a", "structure": {"json_object": True}},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.jsonl", "--out", str(out), "--seed", "5")
    assert ran.code == 0, ran.err
    first, second, third = rows(out)
    assert first["text"] in ("yes", "no")
    assert isinstance(json.loads(second["text"]), dict)
    assert isinstance(json.loads(third["text"]), dict)


@pytest.mark.parametrize("structure", [{"yaml": "a"}, {}, "regex", {"regex": "a", "ebnf": "b"}])
def test_a_bad_structure_names_its_line(tripool, tmp_path, structure):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a", "structure": structure}) + "\n")
    ran = tripool("generate", "fake", "--prompts", f"{tmp_path}/in.jsonl", "--out", f"{tmp_path}/out.jsonl")
    assert ran.code == 2
    assert "line 1" in " ".join(ran.err.split())
