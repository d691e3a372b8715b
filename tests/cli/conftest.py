"""Runs the command line in this process, with the fake engine where a model would be loaded."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tripool.cli.main import main
from tripool.config import EngineConfig
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import CheckpointMissing


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Models:
    """Stands for the loader: makes engines and remembers them."""

    def __init__(self) -> None:
        self.loaded: list[tuple[PagedFake, EngineConfig]] = []

    def load(self, model: str, config: EngineConfig) -> PagedFake:
        if model not in ("fake", "tiny"):
            raise CheckpointMissing(f"no model '{model}'", hint="known names: fake")
        self.loaded.append((PagedFake(fake_text(), name=model), config))
        return self.loaded[-1][0]


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def tripool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Models) -> Callable[..., Ran]:
    def run(*argv: str, stdin: str = "", tty: bool = False) -> Ran:
        typed = io.StringIO(stdin)
        monkeypatch.setattr(typed, "isatty", lambda: tty)
        monkeypatch.setattr("sys.stdin", typed)
        with pytest.raises(SystemExit) as exited:
            main(argv, models.load)
        captured = capsys.readouterr()
        assert all(not engine.open_requests for engine, _ in models.loaded)
        assert isinstance(exited.value.code, int)
        return Ran(exited.value.code, captured.out, captured.err)

    return run
