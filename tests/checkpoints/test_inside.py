"""A checkpoint's files are its own: no link shows a private file, and nothing but regular files is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tripool.checkpoints import FolderCheckpoint, open_checkpoint
from tripool.checkpoints.inside import open_inside
from tripool.errors import CheckpointError, CheckpointMissing

SECRET = "the password is swordfish"
READ = (
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def replace(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def read(folder: Path) -> object:
    with FolderCheckpoint(folder) as checkpoint:
        return checkpoint.text


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("way", ["absolute", "relative", "through a folder", "through a link"])
def test_no_link_leads_out(folder: Path, secret: Path, name: str, way: str) -> None:
    settings = folder / "tokenizer_config.json"
    if name == "chat_template.json":  # which is read if no other place has a template
        settings.write_text("{}")
    inner = folder / "inner"
    if way == "through a folder":
        inner.symlink_to(secret.parent)
    elif way == "through a link":
        inner.symlink_to(secret)
    targets = {"absolute": secret, "relative": "../private/secret", "through a folder": "inner/secret"}
    replace(folder / name, targets.get(way, "inner"))
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder") as refused:
        read(folder)
    assert SECRET not in str(refused.value) and refused.value.hint


def test_shards_are_held_to_it_too(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    replace(folder / "shard.safetensors", tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "shard.safetensors"}}')
    with pytest.raises(CheckpointError, match="leads out"):
        read(folder)


def test_links_that_stay_inside_are_followed(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "one")
    replace(folder / "model.safetensors", "weights/one")
    assert read(folder)


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(folder)
    assert read(tmp_path / "current") == read(folder)


def test_the_hub_cache_is_read_and_no_other_model_in_it(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot, blobs = cache / "models--org--name" / "snapshots" / "abc", cache / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-of-{file.name}")
    assert read(snapshot)
    other = cache / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (blobs / "hash-of-config.json").rename(other / "config")
    replace(snapshot / "config.json", "../../../models--org--other/blobs/config")
    with pytest.raises(CheckpointError, match="leads out"):
        read(snapshot)


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "model.safetensors"])
def test_pipes_and_devices_are_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        read(folder)  # and does not wait for a writer
    for device in ("/dev/zero", "/dev/null"):
        replace(folder / name, device)
        with pytest.raises(CheckpointError, match="no regular file"):
            read(folder)


def test_what_was_opened_counts_not_what_was_looked_at(
    folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced by a link after every check of its name."""
    opened = os.open

    def swap(path: Path, *arguments: int) -> int:
        replace(folder / "config.json", secret)
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(CheckpointError, match="leads out"):
        open_inside(folder / "config.json")


def test_it_works_without_a_proc_file_system(folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripool.checkpoints.inside._DESCRIPTORS", folder / "nowhere")
    assert read(folder)
    replace(folder / "config.json", secret)
    with pytest.raises(CheckpointError, match="leads out"):
        read(folder)


def test_a_dangling_link_is_a_missing_file(folder: Path) -> None:
    replace(folder / "config.json", "nothing")
    with pytest.raises(CheckpointMissing):
        read(folder)


def test_a_file_that_the_user_names_may_be_a_link_but_must_be_a_file(tmp_path: Path, gguf_file: Path) -> None:
    replace(tmp_path / "link.gguf", gguf_file)
    with open_checkpoint(tmp_path / "link.gguf") as checkpoint:
        assert checkpoint.infos()
