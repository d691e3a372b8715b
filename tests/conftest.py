"""For every test: no file of the person who runs them has a part in what they see, nor how fast their machine is."""

from __future__ import annotations

import os
import random
import sys
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in random order, and the tests of each: a file's tests stay together, as they share servers and models."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    rng, files = random.Random(seed), dict[object, list[pytest.Item]]()
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files.values())
    rng.shuffle(order)
    for tests in order:
        rng.shuffle(tests)
    items[:] = [item for tests in order for item in tests]


def pytest_collection_finish() -> None:
    """Networks in tests are small: a second thread of torch would only wait, and wait busily. Who wants two asks."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_key_book_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers and commands look for the key store in the state folder; here that is an empty one."""
    names = ("XDG_STATE_HOME", "XDG_DATA_HOME", "TRIPOOL_API_KEY")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))  # of registered models
    yield
    del os.environ["XDG_STATE_HOME"], os.environ["XDG_DATA_HOME"]
    os.environ.update({name: value for name, value in before.items() if value is not None})
