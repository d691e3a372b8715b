"""For every test: no file of the person who runs them has a part in what they see, nor how fast their machine is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure(config: pytest.Config) -> None:
    """Examples without a time limit, and the same ones in every run of the suite; what is proved may look further."""
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "suite", deadline=None, suppress_health_check=slow, derandomize=config.option.markexpr == "not prove"
    )
    settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _no_key_book_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers and verbs look for the key book in the state folder; here that is an empty one."""
    before = {name: os.environ.pop(name, None) for name in ("XDG_STATE_HOME", "TRIPOOL_API_KEY")}
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    del os.environ["XDG_STATE_HOME"]
    os.environ.update({name: value for name, value in before.items() if value is not None})
