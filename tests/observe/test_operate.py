"""docs/operate.md names every check that doctor makes and every limit that explain can tell."""

import re
from pathlib import Path

import tripool.engine.driver
from tripool.engine import paged
from tripool.observe import checks
from tripool.prefill import scheduler
from tripool.router import placement_trace, placing

PAGE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()


def source(module) -> str:
    return Path(module.__file__).read_text()


def table(header: str) -> set[str]:
    """Names in the first column of the table under a header line."""
    rows = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return {name.strip() for row in rows for name in row.split("|")[1].split(",")}


def test_every_check_is_on_the_page_and_every_name_there_is_a_check():
    assert table("| check | looks at |") == set(re.findall(r'Finding\("([a-z ]+)"', source(checks)))


def test_every_limit_is_on_the_page_and_every_name_there_is_a_limit():
    named = table("| held back by |")
    code = "".join(source(module) for module in (paged, scheduler, placing, placement_trace, tripool.engine.driver))
    for limit in named:
        words = limit.replace("there is no ... worker", "there is no {role} worker")
        assert words in code, limit
    told = re.findall(r'limits\.add\("([^"]+)"\)', source(placement_trace)) + re.findall(
        r'"([^"]+)" if ', source(scheduler)
    )
    assert len(told) >= 5 and set(told) <= named
