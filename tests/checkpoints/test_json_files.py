from __future__ import annotations

import os

import pytest

from tripool.checkpoints.json_files import read_object, read_object_if_there
from tripool.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"3", "not an object"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b"\xff{}", "UTF-8"),
        (b"", "JSON"),
    ],
)
def test_what_is_not_an_object_is_corrupt(tmp_path, content, says):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=says) as caught:
        read_object(path)
    assert caught.value.file == str(path)
    assert caught.value.hint


def test_missing_files(tmp_path):
    assert read_object_if_there(tmp_path / "none.json") == {}
    with pytest.raises(CheckpointMissing, match="do this"):
        read_object(tmp_path / "none.json", hint="do this")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_object(tmp_path)


def test_a_file_without_end_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 2**40)  # which takes no room on the disk
    with pytest.raises(CheckpointCorrupt, match="longer than"):
        read_object(path)


def test_a_key_given_twice_is_found_at_once_among_many(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{" + ",".join(f'"{i}": 0' for i in range(200_000)) + ', "199999": 1}')
    with pytest.raises(CheckpointCorrupt, match="'199999' twice"):
        read_object(path)
