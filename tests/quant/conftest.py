"""Small random networks of every family, each made once, and quantised once with everything on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oracle.case import Case
from oracle.folders import save_case
from oracle.pairs import random_tokens
from tripool.checkpoints import open_checkpoint
from tripool.quant import Quantized, Techniques, quantize


@dataclass
class Made:
    case: Case
    source: Path
    target: Path
    result: Quantized
    windows: list[list[int]]


MadeOf = Callable[[Case], Made]


def windows_of(case: Case, count: int = 3, length: int = 130) -> list[list[int]]:
    rng = random.Random(case.name)
    return [random_tokens(case.settings["vocab_size"], length, rng) for _ in range(count)]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    made: dict[str, Path] = {}

    def get(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = save_case(case, tmp_path_factory.mktemp(case.name))
        return made[case.name]

    return get


@pytest.fixture(scope="session")
def made_of(folder_of: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory) -> MadeOf:
    made: dict[str, Made] = {}

    def get(case: Case) -> Made:
        if case.name not in made:
            source, windows = folder_of(case), windows_of(case)
            target = tmp_path_factory.mktemp(case.name) / "int8"
            with open_checkpoint(source) as checkpoint:
                result = quantize(checkpoint, target, techniques=Techniques(keep=0.1), windows=windows)
            made[case.name] = Made(case, source, target, result, windows)
        return made[case.name]

    return get
