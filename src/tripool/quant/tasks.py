"""Tasks that score a model: questions with choices or with an answer to be written. Reads and checks their files.

A `.jsonl` file is one task, named after the file, a question per line. A `.toml` file has several, `[[task]]` each,
with options of their own and questions in it or in a `.jsonl` file beside it. No tensors.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tripool.errors import TripoolError


class TaskError(TripoolError, status=400, code="bad_task"):
    """A task file cannot be used."""

    def __init__(self, message: str, *, hint: str, file: Path, line: int | None = None) -> None:
        super().__init__(f"{message} [{file}{'' if line is None else f', line {line}'}]", hint=hint)


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    choices: tuple[str, ...]
    """Empty: the answer is written by the model."""
    answers: tuple[str, ...]
    """Texts that count as right; with choices, the right one alone."""

    @property
    def answer(self) -> int:
        """With choices."""
        return self.choices.index(self.answers[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    questions: tuple[Question, ...]
    instruction: str = ""
    """Stands before every question."""
    chat: bool = False
    """Questions are messages of a user, rendered by the model's chat template."""
    delimiter: str = " "
    """Between a question and a choice; in a chat there is none."""
    stop: tuple[str, ...] = ("\n",)
    """Ends a written answer."""
    max_tokens: int = 64
    ignore_case: bool = False

    @property
    def is_choice(self) -> bool:
        return bool(self.questions[0].choices)

    @property
    def figures(self) -> tuple[str, ...]:
        return ("acc", "acc_norm") if self.is_choice else ("exact_match",)


_OPTIONS: Mapping[str, type] = {
    "instruction": str, "chat": bool, "delimiter": str, "stop": list, "max_tokens": int, "ignore_case": bool
}  # fmt: skip
assert _OPTIONS.keys() == {one.name for one in fields(Task)} - {"name", "questions"}


def read_tasks(file: Path) -> list[Task]:
    if file.suffix == ".jsonl":
        return [Task(name=file.stem, questions=_read_lines(file))]
    if file.suffix != ".toml":
        raise TaskError(f"'{file.suffix}' is no task file", hint="give a .jsonl or a .toml file", file=file)
    try:
        tree = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"not TOML: {error}", hint="see docs/quantize.md for an example", file=file) from None
    tables = tree.pop("task", None)
    if tree or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise TaskError("tasks are tables [[task]], and nothing else", hint="see docs/quantize.md", file=file)
    tasks = [_table(table, file) for table in tables]
    names = [task.name for task in tasks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TaskError(f"two tasks are named '{min(twice)}'", hint="give each a name of its own", file=file)
    return tasks


def digest(tasks: list[Task]) -> str:
    """Of all that decides a score."""
    return blake2b(repr(tasks).encode(), digest_size=16).hexdigest()


def _table(table: dict[str, Any], file: Path) -> Task:
    options = {key: value for key, value in table.items() if key not in ("name", "file", "questions")}
    name, source, inside = (table.get(key) for key in ("name", "file", "questions"))
    if not isinstance(name, str) or not name or (source is None) == (inside is None):
        hint = "each [[task]] has a name, and either `file` or `questions`"
        raise TaskError(f"a task {name!r} without a name or questions, or with both", hint=hint, file=file)
    for key, value in options.items():
        wanted = _OPTIONS.get(key)
        if wanted is None:
            hint = f"known: name, file, questions, {', '.join(_OPTIONS)}"
            raise TaskError(f"task '{name}' has an unknown option '{key}'", hint=hint, file=file)
        texts = wanted is not list or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        if type(value) is not wanted or not texts or (isinstance(value, int) and key == "max_tokens" and value < 1):
            raise TaskError(f"task '{name}': {key} is {value!r}", hint="see docs/quantize.md", file=file)
    if "stop" in options:
        options["stop"] = tuple(one for one in options["stop"] if one)
    if source is not None:
        return Task(name=name, questions=_read_lines(file.parent / str(source)), **options)
    if not isinstance(inside, list):
        raise TaskError(f"task '{name}': questions is no list", hint="questions = [{...}, ...]", file=file)
    return Task(name=name, questions=_alike([_question(one, file, None) for one in inside], file), **options)


def _read_lines(file: Path) -> tuple[Question, ...]:
    questions = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise TaskError(f"not JSON: {error}", hint="one object per line", file=file, line=number) from None
            questions.append(_question(value, file, number))
    return _alike(questions, file)


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot be read: {error}", hint="give a file of UTF-8 text", file=file) from error


def _question(value: Any, file: Path, line: int | None) -> Question:
    """`answer`: the number of the right choice, from 0; without choices a text, or several that are right."""
    hint = '{"question": "...", "choices": ["...", "..."], "answer": 0}, or {"question": "...", "answer": "..."}'
    if not isinstance(value, dict) or value.keys() - {"question", "choices", "answer"}:
        raise TaskError(f"not a question: {str(value)[:60]}", hint=hint, file=file, line=line)
    text, choices, answer = value.get("question"), value.get("choices"), value.get("answer")
    if not isinstance(text, str):
        raise TaskError("a question without its text", hint=hint, file=file, line=line)
    if choices is None:
        answers = [answer] if isinstance(answer, str) else answer
        if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
            raise TaskError(f"the answer is {answer!r}", hint=hint, file=file, line=line)
        return Question(text, (), tuple(answers))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise TaskError("fewer than two choices, or an empty one", hint=hint, file=file, line=line)
    if len(set(choices)) < len(choices):
        raise TaskError("a choice twice", hint="choices must differ", file=file, line=line)
    if type(answer) is not int or not 0 <= answer < len(choices):
        hint = f"the number of the right choice, 0 to {len(choices) - 1}"
        raise TaskError(f"the answer is {answer!r}", hint=hint, file=file, line=line)
    return Question(text, tuple(choices), (choices[answer],))


def _alike(questions: list[Question], file: Path) -> tuple[Question, ...]:
    if len({bool(one.choices) for one in questions}) != 1:
        what = "questions with and without choices" if questions else "no question"
        raise TaskError(what, hint="a task has questions of one kind", file=file)
    return tuple(questions)
