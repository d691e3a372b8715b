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

from tripool.cache.image import ALIGN, ImageDamaged, open_image
from tripool.cache.images import ModelImages
from tripool.errors import ArenaError

QUOTA = 2**20
PARTS = [("embed", bytes(range(256)) * 8), ("empty", b""), ("odd", b"\x07" * 13), ("last", b"end")]


def write(images: ModelImages, key: str, parts=PARTS, facts: bytes = b"facts") -> None:
    with images.turn(key) as alone:
        assert alone
        writer = images.writer(key)
        for label, data in parts:
            placed = writer.place(label, "uint8", (len(data),), memoryview(data))
            assert placed is not None and bytes(placed) == data
        images.publish(key, writer, facts)


def held(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.suffix != ".lock")


@pytest.fixture
def images(tmp_path) -> ModelImages:
    return ModelImages(tmp_path / "models", QUOTA)


def test_what_was_placed_comes_back_in_order_and_aligned(images, tmp_path):
    write(images, "a")
    image = images.find("a")
    assert image.facts == b"facts"
    assert [(one.label, bytes(image.view(one))) for one in image.tensors] == PARTS
    assert all(one.offset % ALIGN == 0 for one in image.tensors)
    assert held(tmp_path / "models") == ["a.image"]
    assert (images.counters.hits, images.counters.misses, images.counters.written) == (1, 1, 1)


def test_there_is_nothing_under_another_key(images, tmp_path):
    write(images, "a")
    assert images.find("b") is None
    os.rename(tmp_path / "models" / "a.image", tmp_path / "models" / "b.image")
    assert images.find("b") is None
    assert images.counters.damaged == 1


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_single_changed_byte_is_found_or_lies_in_padding(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("images")
    images = ModelImages(folder, QUOTA)
    write(images, "a")
    path = folder / "a.image"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        image = open_image(path, "a")
    except ImageDamaged:
        assert images.find("a") is None and images.counters.damaged == 1
        assert not path.exists()
    else:
        assert [(one.label, bytes(image.view(one))) for one in image.tensors] == PARTS


@pytest.mark.parametrize("length", [0, 10, 31, 64, 1000])
def test_an_image_that_was_cut_off_is_damaged(images, tmp_path, length):
    write(images, "a")
    os.truncate(tmp_path / "models" / "a.image", length)
    assert images.find("a") is None
    write(images, "a")
    assert images.find("a") is not None


def test_a_stray_write_reaches_nobody_else(images):
    write(images, "a")
    mine, other = images.find("a"), images.find("a")
    mine.view(mine.tensors[0])[:4] = b"oops"
    assert bytes(other.view(other.tensors[0])) == PARTS[0][1]
    assert images.find("a") is not None


def test_the_one_used_longest_ago_goes_and_never_one_in_use(tmp_path):
    images = ModelImages(tmp_path, 10_000)
    parts = [("all", b"x" * 3000)]
    for age, key in enumerate("abc"):
        write(images, key, parts)
        os.utime(tmp_path / f"{key}.image", (age, age))
    image = images.find("b")
    view = image.view(image.tensors[0])
    del image  # its view alone keeps it
    os.utime(tmp_path / "b.image", (-5, -5))
    write(images, "d", parts)
    assert list(images.sizes()) == ["b", "c", "d"] and images.counters.evicted == 1
    assert not images.remove("b")
    del view
    assert images.remove("b")


def test_what_is_larger_than_the_quota_does_not_fit(tmp_path):
    images = ModelImages(tmp_path, 4096)
    with images.turn("a"):
        writer = images.writer("a")
        kept = writer.place("one", "uint8", (3000,), memoryview(b"1" * 3000))
        assert writer.place("two", "uint8", (3000,), memoryview(b"2" * 3000)) is None
        writer.abandon()
    assert bytes(kept) == b"1" * 3000
    assert held(tmp_path) == []


def test_the_second_of_two_waits_for_the_first(tmp_path):
    first, second = ModelImages(tmp_path, QUOTA), ModelImages(tmp_path, QUOTA, wait_s=60)
    asked, found = threading.Event(), []
    second._pause = lambda seconds: asked.set()

    def wait() -> None:
        with second.turn("a") as alone:
            found.append((alone, second.find("a") is not None))

    thread = threading.Thread(target=wait)
    with first.turn("a"):
        thread.start()
        assert asked.wait(60)
        writer = first.writer("a")
        writer.place("one", "uint8", (3,), memoryview(b"abc"))
        first.publish("a", writer, b"")
    thread.join(60)
    assert found == [(True, True)]


def test_waiting_has_a_bound(tmp_path):
    now = iter(range(100))
    slow = ModelImages(tmp_path, QUOTA)
    hasty = ModelImages(tmp_path, QUOTA, wait_s=5, clock=lambda: next(now), pause=lambda seconds: None)
    with slow.turn("a"), hasty.turn("a") as alone:
        assert not alone
    assert hasty.counters.refused == 1


WRITE_AND_HANG = """
import sys, time
from pathlib import Path
from tripool.cache.images import ModelImages
images = ModelImages(Path(sys.argv[1]), 2**20)
with images.turn("a"):
    writer = images.writer("a")
    writer.place("one", "uint8", (3,), memoryview(b"abc"))
    print("placed", flush=True)
    time.sleep(600)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_lasts(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITE_AND_HANG, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"placed\n"
        images = ModelImages(tmp_path, QUOTA)
        assert images.find("a") is None
        child.send_signal(signal.SIGKILL)
    assert held(tmp_path) == ["a.unfinished"]
    write(images, "b")
    assert held(tmp_path) == ["b.image"]
    write(images, "a")
    assert images.find("a") is not None


def test_another_users_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ArenaError, match=r"another user|not this user"):
        ModelImages(tmp_path, QUOTA)


def test_a_folder_that_goes_while_an_image_is_written_costs_the_image_alone(tmp_path):
    images = ModelImages(tmp_path / "models", QUOTA)
    with images.turn("a"):
        writer = images.writer("a")
        kept = writer.place("one", "uint8", (3,), memoryview(b"abc"))
        shutil.rmtree(tmp_path / "models")
        images.publish("a", writer, b"")
    assert bytes(kept) == b"abc"
    assert (images.counters.written, images.counters.refused) == (0, 1)


def test_a_full_memory_is_a_refusal_and_leaves_nothing(tmp_path, monkeypatch):
    images = ModelImages(tmp_path, QUOTA)
    with images.turn("a"):
        writer = images.writer("a")
        writer.place("one", "uint8", (3,), memoryview(b"abc"))

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        images.publish("a", writer, b"")
    assert images.counters.refused == 1 and held(tmp_path) == []
