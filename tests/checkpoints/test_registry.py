"""The registry: versions never change, the pointer is moved forward and back, what a crash left is not there."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tripool.checkpoints import Registry, RegistryError, locate, open_checkpoint, pinned, registered
from tripool.checkpoints.content import content_hash
from tripool.checkpoints.registry import VersionUnknown
from tripool.errors import CheckpointMissing


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "deep" / "weights").write_bytes(b"1234")
    return folder


def test_what_was_changed_meanwhile_is_not_registered(registry: Registry, source: Path, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="changed meanwhile"):
        registry.add("story", source, {}, key="a", expected="another")
    assert registry.versions("story") == [] and not list((tmp_path / "registry/story").glob(".unfinished-*"))
    version = registry.add("story", source, {}, key="b")
    assert registry.add("story", source, {}, key="c", expected=version.content).number == 2


def test_versions_are_numbered_and_the_same_key_is_the_same_version(registry: Registry, source: Path) -> None:
    first = registry.add("story", source, {"figures": {"acc": 0.5}}, key="a")
    assert registry.add("story", source, {}, key="a") == first
    second = registry.add("story", source, {}, key="b")
    assert (first.label, second.label) == ("story@1", "story@2")
    assert first.content == content_hash(source) == content_hash(first.path) and first.lineage["figures"] == {
        "acc": 0.5
    }
    assert all(file.stat().st_mode & 0o222 == 0 for file in first.path.rglob("*") if file.is_file())
    assert registry.names() == ["story"] and [one.number for one in registry.versions("story")] == [1, 2]


def test_a_file_is_registered_too_and_keeps_its_hash(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    version = registry.add("story", file, {}, key="a")
    assert version.path.name == "story@1.gguf" and version.path.is_file()
    assert version.content == content_hash(file) == content_hash(version.path)


def test_the_pointer_goes_forward_and_back(registry: Registry, source: Path) -> None:
    for key in "abc":
        registry.add("story", source, {}, key=key)
    assert registry.published("story") is None
    with pytest.raises(VersionUnknown):
        registry.publish("story", 4)
    for number in (1, 3, 3, 2):
        registry.publish("story", number)
    assert registry.published("story") == 2
    assert [registry.roll_back("story"), registry.roll_back("story")] == [3, 1]
    with pytest.raises(RegistryError, match="nothing was published before story@1"):
        registry.roll_back("story")
    assert registry.published("story") == 1


def test_what_killed_processes_left_is_not_there_and_goes(registry: Registry, source: Path) -> None:
    """A copy that was not finished, and a version without its record."""
    registry.add("story", source, {}, key="a")
    folder = registry.folder / "story"
    (folder / ".unfinished-999999999-x").mkdir()
    (folder / "story@2").mkdir()
    assert [one.number for one in registry.versions("story")] == [1]
    with pytest.raises(VersionUnknown):
        registry.version("story", 2)
    assert registry.add("story", source, {}, key="b").number == 2
    assert not (folder / ".unfinished-999999999-x").exists()


def test_those_that_register_at_once_get_versions_of_their_own(registry: Registry, source: Path) -> None:
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda key=key: numbers.append(registry.add("story", source, {}, key=key).number))
        for key in "abcdef"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6] == [one.number for one in registry.versions("story")]


def test_names(registry: Registry, source: Path, tmp_path: Path) -> None:
    registry.add("story", source, {}, key="a")
    at = f"{registry.folder}/story"
    found = registered(f"{at}@1")
    assert found is not None and found.number == 1 and found.pinned == f"{at}@1"
    with pytest.raises(RegistryError, match="no version of 'story' is published"):
        pinned(at)
    registry.publish("story", 1)
    assert pinned(at) == f"{at}@1" and locate(at) == registry.version("story", 1).path
    assert pinned("tiny") == "tiny" and registered("tiny") is None and registered("nothing@x") is None
    assert registered(str(tmp_path / "source")) is None
    with pytest.raises(RegistryError, match="no name for a model"):
        registry.add("../story", source, {}, key="a")
    with pytest.raises(VersionUnknown):
        open_checkpoint(f"{at}@7")


def test_by_name_alone_in_the_users_registry(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(CheckpointMissing):
        open_checkpoint("story")
    Registry().add("story", source, {}, key="a")
    Registry().publish("story", 1)
    assert pinned("story") == "story@1"
    assert json.loads((tmp_path / "data/tripool/models/story/published.json").read_text())["version"] == 1
