"""Task files, and scores against log-likelihoods summed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batch.pipeline_case import small_checkpoint
from tripool.checkpoints import open_checkpoint
from tripool.cli.main import main
from tripool.errors import InvalidRequest
from tripool.quant import Side, TaskError, read_tasks, score
from tripool.quant.tasks import digest
from tripool.text import Tokenizer

CHOICES = ["Paris", "a very long river", "two"]
GOOD = """
[[task]]
name = "choose"
file = "choose.jsonl"

[[task]]
name = "write"
chat = true
max_tokens = 6
stop = ["\\n"]
ignore_case = true
questions = [{question = "Who?", answer = "I"}, {question = "Why?", answer = ["A", "B"]}]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [{"question": f"The number {i} is", "choices": CHOICES, "answer": i % 3} for i in range(4)]
    (tmp_path / "choose.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    (tmp_path / "tasks.toml").write_text(GOOD, "utf-8")
    return tmp_path / "tasks.toml"


def test_choices_are_scored_by_log_likelihood_with_and_without_length(checkpoint: Path, file: Path) -> None:
    task, _ = read_tasks(file)
    with open_checkpoint(checkpoint) as one:
        (found,) = score(one, "float32", [task])
        side, tokenizer = Side(one, "float32", window=64, num_answers=1), Tokenizer(one.text)
    acc = acc_norm = 0
    for question, sample in zip(task.questions, found.samples, strict=True):
        likely = []
        for choice in CHOICES:
            before, whole = tokenizer.encode(question.text), tokenizer.encode(f"{question.text} {choice}")
            with torch.inference_mode():
                said = side.logits(whole).log_softmax(-1)
            likely.append(sum(float(said[i - 1, whole[i]]) for i in range(len(before), len(whole))))
        assert sample["log_likelihoods"] == pytest.approx(likely, abs=1e-3)
        by_length = [value / len(choice) for value, choice in zip(likely, CHOICES, strict=True)]
        acc += likely.index(max(likely)) == question.answer
        acc_norm += by_length.index(max(by_length)) == question.answer
    assert found.figures == {"acc": acc / 4, "acc_norm": acc_norm / 4}
    assert found.num_questions == 4


def test_written_answers_end_at_a_stop_and_compare_as_asked(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    _, task = read_tasks(file)
    with open_checkpoint(checkpoint) as one:
        (found,) = score(one, "float32", [task])
        tokenizer = Tokenizer(one.text)
        side = Side(one, "float32", window=64, num_answers=1)
        prompt = tokenizer.encode_chat([{"role": "user", "content": "Who?"}], add_generation_prompt=True)
        with torch.inference_mode():
            (answer,) = side.greedy([prompt], 6)
    text = tokenizer.decode(answer)
    assert found.samples[0]["answer"] == text.partition("\n")[0]
    right = json.dumps({"question": "Who?", "answer": f" {text.partition(chr(10))[0].upper()} "})
    for ignore, figure in (("true", 1.0), ("false", float(text.strip() == text.strip().upper()))):
        (tmp_path / "w.jsonl").write_text(right, "utf-8")
        options = f"chat = true\nmax_tokens = 6\nignore_case = {ignore}\n"
        (tmp_path / "w.toml").write_text(f'[[task]]\nname = "w"\nfile = "w.jsonl"\n{options}', "utf-8")
        with open_checkpoint(checkpoint) as one:
            (again,) = score(one, "float32", read_tasks(tmp_path / "w.toml"))
        assert again.figures == {"exact_match": figure}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "?"', "not JSON"),
        ('{"question": "?", "choices": ["a"], "answer": 0}', "fewer than two"),
        ('{"question": "?", "choices": ["a", "b"], "answer": 2}', "the answer is 2"),
        ('{"question": "?", "choices": ["a", "b"], "answer": true}', "the answer is True"),
        ('{"question": "?", "choices": ["a", "a"], "answer": 0}', "a choice twice"),
        ('{"question": "?", "answer": []}', "the answer is"),
        ('{"question": "?", "gold": "a"}', "not a question"),
        ('{"answer": "a"}', "without its text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "ok", "answer": "a"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(TaskError, match=said) as refused:
        read_tasks(file)
    assert "line 3" in refused.value.message


def test_what_is_no_task_file_is_refused(file: Path, tmp_path: Path) -> None:
    for old, new, said in (
        ('name = "write"', 'name = "choose"', "two tasks"),
        ("max_tokens = 6", "max_tokens = 0", "max_tokens is 0"),
        ("chat = true", "chats = true", "unknown option 'chats'"),
        ("chat = true", 'file = "choose.jsonl"', "with both"),
        ("choose.jsonl", "none.jsonl", "cannot be read"),
        ("[[task]]", "[[tasks]]", "tables"),
    ):
        assert old in GOOD
        wrong = tmp_path / "wrong.toml"
        wrong.write_text(GOOD.replace(old, new), "utf-8")
        with pytest.raises(TaskError, match=said):
            read_tasks(wrong)
    (tmp_path / "mixed.jsonl").write_text(
        '{"question": "?", "answer": "a"}\n{"question": "?", "choices": ["a", "b"], "answer": 0}', "utf-8"
    )
    with pytest.raises(TaskError, match="with and without"):
        read_tasks(tmp_path / "mixed.jsonl")
    changed = tmp_path / "changed.toml"
    changed.write_text(GOOD.replace('answer = "I"', 'answer = "J"'), "utf-8")
    assert digest(read_tasks(changed)) != digest(read_tasks(file)) == digest(read_tasks(file))


def test_what_the_model_cannot_read_is_refused_before_it_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "long " * 5000, "answer": "a"}), "utf-8")
    with open_checkpoint(checkpoint) as one, pytest.raises(InvalidRequest, match="shorten"):
        score(one, "float32", read_tasks(tmp_path / "long.jsonl"))


def test_the_command_scores_both_models(checkpoint: Path, file: Path, tmp_path: Path, capsys: Any) -> None:
    numbers = tmp_path / "numbers.json"
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(checkpoint), str(checkpoint), "--tasks", str(file), "--json", str(numbers), "--threads", "1",
              "--precision-b", "float32"])  # fmt: skip
    assert not ended.value.code
    first, second = json.loads(numbers.read_text())["tasks"]
    assert first["scores"] == second["scores"]
    assert [one["task"] for one in first["scores"]] == ["choose", "write"]
    assert "acc_norm" in capsys.readouterr().out
