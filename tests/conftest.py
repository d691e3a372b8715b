"""For every test: no file of the person who runs them has a part in what they see."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_key_book_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers and verbs look for the key book in the state folder; here that is an empty one."""
    before = {name: os.environ.pop(name, None) for name in ("XDG_STATE_HOME", "TRIPOOL_API_KEY")}
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    del os.environ["XDG_STATE_HOME"]
    os.environ.update({name: value for name, value in before.items() if value is not None})
