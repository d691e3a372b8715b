"""docs/glossary.md names modules that exist, one or more for each term."""

import re
from importlib.util import find_spec
from pathlib import Path

GLOSSARY = Path(__file__).parent.parent / "docs" / "glossary.md"
ROW = re.compile(r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \| (?P<modules>[^|]+) \|$")


def test_every_term_names_modules_that_exist() -> None:
    rows = [found for line in GLOSSARY.read_text("utf-8").splitlines() if (found := ROW.match(line))]
    terms = [row["term"] for row in rows if row["term"] not in ("term", "---")]
    assert len(terms) >= 30 and len(set(terms)) == len(terms)
    for row in rows:
        if row["term"] in terms:
            modules = re.findall(r"`(tripool[\w.]*)`", row["modules"])
            assert modules, f"'{row['term']}' names no module"
            for module in modules:
                assert find_spec(module) is not None, f"'{row['term']}' names {module}, which does not exist"
