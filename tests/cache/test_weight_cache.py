"""Images of the model cache: whole or not there, one writer, never removed under a reader, within a quota."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.cache.weight_cache import WeightCache
from tripool.cache.weight_image import ALIGN, WeightImageDamaged, open_weight_image
from tripool.errors import ArenaError

QUOTA = 2**20
PARTS = [("embed", bytes(range(256)) * 8), ("empty", b""), ("odd", b"\x07" * 13), ("last", b"end")]


def write(weight_cache: WeightCache, key: str, parts=PARTS, facts: bytes = b"facts") -> None:
    with weight_cache.exclusive(key) as alone:
        assert alone
        writer = weight_cache.writer(key)
        for label, data in parts:
            placed = writer.place(label, "uint8", (len(data),), memoryview(data))
            assert placed is not None and bytes(placed) == data
        weight_cache.publish(key, writer, facts)


def held(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.suffix != ".lock")


@pytest.fixture
def weight_cache(tmp_path) -> WeightCache:
    return WeightCache(tmp_path / "models", QUOTA)


def test_what_was_placed_comes_back_in_order_and_aligned(weight_cache, tmp_path):
    write(weight_cache, "a")
    image = weight_cache.find("a")
    assert image.facts == b"facts"
    assert [(one.label, bytes(image.view(one))) for one in image.tensors] == PARTS
    assert all(one.offset % ALIGN == 0 for one in image.tensors)
    assert held(tmp_path / "models") == ["a.image"]
    assert (weight_cache.counters.hits, weight_cache.counters.misses, weight_cache.counters.written) == (1, 1, 1)


def test_there_is_nothing_under_another_key(weight_cache, tmp_path):
    write(weight_cache, "a")
    assert weight_cache.find("b") is None
    os.rename(tmp_path / "models" / "a.image", tmp_path / "models" / "b.image")
    assert weight_cache.find("b") is None
    assert weight_cache.counters.damaged == 1


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_single_changed_byte_is_found_or_lies_in_padding(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("images")
    weight_cache = WeightCache(folder, QUOTA)
    write(weight_cache, "a")
    path = folder / "a.image"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        image = open_weight_image(path, "a")
    except WeightImageDamaged:
        assert weight_cache.find("a") is None and weight_cache.counters.damaged == 1
        assert not path.exists()
    else:
        assert [(one.label, bytes(image.view(one))) for one in image.tensors] == PARTS


@pytest.mark.parametrize("length", [0, 10, 31, 64, 1000])
def test_an_image_that_was_cut_off_is_damaged(weight_cache, tmp_path, length):
    write(weight_cache, "a")
    os.truncate(tmp_path / "models" / "a.image", length)
    assert weight_cache.find("a") is None
    write(weight_cache, "a")
    assert weight_cache.find("a") is not None


def test_a_stray_write_reaches_nobody_else(weight_cache):
    write(weight_cache, "a")
    mine, other = weight_cache.find("a"), weight_cache.find("a")
    mine.view(mine.tensors[0])[:4] = b"oops"
    assert bytes(other.view(other.tensors[0])) == PARTS[0][1]
    assert weight_cache.find("a") is not None


def test_the_one_used_longest_ago_goes_and_never_one_in_use(tmp_path):
    weight_cache = WeightCache(tmp_path, 10_000)
    parts = [("all", b"x" * 3000)]
    for age, key in enumerate("abc"):
        write(weight_cache, key, parts)
        os.utime(tmp_path / f"{key}.image", (age, age))
    image = weight_cache.find("b")
    view = image.view(image.tensors[0])
    del image  # its view alone keeps it
    os.utime(tmp_path / "b.image", (-5, -5))
    write(weight_cache, "d", parts)
    assert list(weight_cache.sizes()) == ["b", "c", "d"] and weight_cache.counters.evicted == 1
    assert not weight_cache.remove("b")
    del view
    assert weight_cache.remove("b")


def test_what_is_larger_than_the_quota_does_not_fit(tmp_path):
    weight_cache = WeightCache(tmp_path, 4096)
    with weight_cache.exclusive("a"):
        writer = weight_cache.writer("a")
        kept = writer.place("one", "uint8", (3000,), memoryview(b"1" * 3000))
        assert writer.place("two", "uint8", (3000,), memoryview(b"2" * 3000)) is None
        writer.abandon()
    assert bytes(kept) == b"1" * 3000
    assert held(tmp_path) == []


def test_the_second_of_two_waits_for_the_first(tmp_path):
    first, second = WeightCache(tmp_path, QUOTA), WeightCache(tmp_path, QUOTA, wait_s=60)
    asked, found = threading.Event(), []
    second._pause = lambda seconds: asked.set()

    def wait() -> None:
        with second.exclusive("a") as alone:
            found.append((alone, second.find("a") is not None))

    thread = threading.Thread(target=wait)
    with first.exclusive("a"):
        thread.start()
        assert asked.wait(60)
        writer = first.writer("a")
        writer.place("one", "uint8", (3,), memoryview(b"abc"))
        first.publish("a", writer, b"")
    thread.join(60)
    assert found == [(True, True)]


def test_waiting_has_a_bound(tmp_path):
    now = iter(range(100))
    slow = WeightCache(tmp_path, QUOTA)
    hasty = WeightCache(tmp_path, QUOTA, wait_s=5, clock=lambda: next(now), pause=lambda seconds: None)
    with slow.exclusive("a"), hasty.exclusive("a") as alone:
        assert not alone
    assert hasty.counters.refused == 1


WRITE_AND_HANG = """
import sys, time
from pathlib import Path
from tripool.cache.weight_cache import WeightCache
images = WeightCache(Path(sys.argv[1]), 2**20)
with images.exclusive("a"):
    writer = images.writer("a")
    writer.place("one", "uint8", (3,), memoryview(b"abc"))
    print("placed", flush=True)
    time.sleep(600)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_lasts(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITE_AND_HANG, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"placed\n"
        weight_cache = WeightCache(tmp_path, QUOTA)
        assert weight_cache.find("a") is None
        child.send_signal(signal.SIGKILL)
    assert held(tmp_path) == ["a.unfinished"]
    write(weight_cache, "b")
    assert held(tmp_path) == ["b.image"]
    write(weight_cache, "a")
    assert weight_cache.find("a") is not None


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ArenaError, match=r"another user|not belong to this user"):
        WeightCache(tmp_path, QUOTA)


def test_a_folder_that_goes_while_an_image_is_written_costs_the_image_alone(tmp_path):
    weight_cache = WeightCache(tmp_path / "models", QUOTA)
    with weight_cache.exclusive("a"):
        writer = weight_cache.writer("a")
        kept = writer.place("one", "uint8", (3,), memoryview(b"abc"))
        shutil.rmtree(tmp_path / "models")
        weight_cache.publish("a", writer, b"")
    assert bytes(kept) == b"abc"
    assert (weight_cache.counters.written, weight_cache.counters.refused) == (0, 1)


def test_a_full_memory_is_a_refusal_and_leaves_nothing(tmp_path, monkeypatch):
    weight_cache = WeightCache(tmp_path, QUOTA)
    with weight_cache.exclusive("a"):
        writer = weight_cache.writer("a")
        writer.place("one", "uint8", (3,), memoryview(b"abc"))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        weight_cache.publish("a", writer, b"")
    assert weight_cache.counters.refused == 1 and held(tmp_path) == []
