"""Without compiled kernels the engine still runs, in float32, and says so."""

import logging

import pytest

from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.kernels.cpu8 import library


@pytest.fixture
def no_kernels(tmp_path, monkeypatch):
    """As on a machine where nothing could be compiled."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def load(precision) -> Engine:
    return load_engine("tiny", EngineConfig(kv_gb=0.05, threads=1, precision=precision))


def answer(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8)
    engine.add(Request(id="one", prompt_ids=(5, 6, 7, 8), params=params, seed=0))
    tokens = []
    while engine.busy:
        tokens += [event.token_id for event in engine.step()]
    return tokens


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_it_computes_in_float32_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="tripool"):
        engine = load("int8")
    assert "float32" in caplog.text and "compiler" in caplog.text
    assert answer(engine) == answer(load("float32"))


@pytest.mark.usefixtures("no_kernels")
def test_who_asked_for_float32_hears_nothing(caplog):
    load("float32")
    assert not caplog.records


def test_with_kernels_it_computes_in_8_bits_and_says_nothing(caplog):
    assert load("int8").weight_bytes < load("float32").weight_bytes / 2
    assert not caplog.records


@pytest.mark.usefixtures("no_kernels")
def test_kernels_that_are_not_there_are_named_with_what_to_do():
    assert library.variants() == []
    for variant in (None, "plain", "avx2"):
        with pytest.raises(library.KernelsMissing, match="compiler") as refused:
            library.library(variant)
        assert refused.value.code == "kernels_missing" and "float32" in refused.value.hint


def test_kernels_of_an_unknown_name_are_missing_too():
    with pytest.raises(library.KernelsMissing):
        library.library("sparc")
