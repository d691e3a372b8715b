"""Each case once per session, made when a test first asks for it."""

from __future__ import annotations

import pytest

from oracle.case import Case
from oracle.pairs import Pair, PairOf, make_pair


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    made: dict[str, Pair] = {}

    def get(case: Case) -> Pair:
        if case.name not in made:
            made[case.name] = make_pair(case, tmp_path_factory.mktemp(case.name))
        return made[case.name]

    return get
