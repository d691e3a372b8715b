"""Ranks of a joined host: who is there, and who must end because the others have given it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tripool.control.instance import Instance, map_file, slabs_file, write_map
from tripool.control.joined_instance import JoinedInstance, present_file, read_present
from tripool.experts.exchange import SharedView, raise_fence
from tripool.experts.layout import Bell, Layout
from tripool.experts.slabs import attach_slabs

LAYOUT = Layout(ranks=3, layers=2, experts=8, top_k=2, hidden=64, slab_rows=4)


def test_a_rank_ends_when_a_map_that_named_it_does_not_any_more(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    leader, joined = Instance("d", there, LAYOUT), JoinedInstance("d", here, LAYOUT)
    present = present_file(here, "d")

    def send_map() -> None:
        write_map(map_file(here, "d"), map_file(there, "d").read_bytes())

    leader.enter(0)
    send_map()
    joined.enter(1)
    joined.enter(2)
    assert joined.outdated() == [], "they have not been in a map yet"
    first = read_present(present)
    assert first.keys() == {1, 2} and len(set(first.values())) == 2 and 0 not in first.values()
    for rank, process in first.items():
        assert leader.remote(rank, process)
    send_map()
    assert joined.outdated() == [] and joined.epoch == leader.epoch
    leader.remote(2, 0)
    send_map()
    assert joined.outdated() == [2]
    joined.leave(2)
    assert joined.outdated() == [] and read_present(present).keys() == {1}
    joined.enter(2)
    assert read_present(present)[2] != first[2] and joined.outdated() == [], "a new process has to be named first"
    map_file(here, "d").unlink()
    assert joined.outdated() == [1], "the server's host is silent; rank 2 waits for its first map"


@pytest.mark.parametrize("silent_first", [True, False])
def test_the_maps_of_a_server_that_was_started_again_count_from_one(tmp_path: Path, silent_first: bool) -> None:
    """Its requests must not look older than what the maps before have fenced."""
    folders = [tmp_path / name for name in ("here", "before", "after")]
    for folder in folders:
        folder.mkdir()
    here, *leaders = folders
    joined = JoinedInstance("d", here, LAYOUT)
    view = SharedView(*attach_slabs(slabs_file(here, "d")))
    joined.enter(1)
    for number, folder in enumerate(leaders):
        leader = Instance("d", folder, LAYOUT)
        for rank in (0, 2) if number else (0, 2, 1):
            leader.enter(rank)
        if number and silent_first:
            map_file(here, "d").unlink()
            assert joined.outdated() == [1]
        write_map(map_file(here, "d"), map_file(folder, "d").read_bytes())
        if number == 0:
            assert joined.outdated() == []
            raise_fence(view, 0, leader.epoch)
            view.dispatch_bell(1, 0, 0).ring(Bell(3, 1, 9))
    assert joined.outdated() == [1]
    assert view.fence(0)[0] == 3
    joined.leave(1)
    assert view.fence(0)[0] == 0 and view.dispatch_bell(1, 0, 0).read() == Bell(0, 0, 0)


def test_without_a_file_nobody_is_there(tmp_path: Path) -> None:
    assert read_present(tmp_path / "none") == {}
