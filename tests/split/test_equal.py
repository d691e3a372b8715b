"""Split equals colocated, token for token and to the last bit of a log-probability, on the exact path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.mtp_traffic import BLOCK_GB, Bundled, bundled, mixed_request, run
from tripool.core import TokenEvent
from tripool.kernels import CPU8
from tripool.kernels.cpu8.library import set_threads
from tripool.messages import WorkerId

from .in_process import Fleet

Answers = dict[tuple[str, int], list[tuple[object, ...]]]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    set_threads(1)
    with bundled(CPU8) as model:
        yield model


def answers(events: dict[tuple[str, int], list[TokenEvent]]) -> Answers:
    return {k: [(e.index, e.token_id, e.finish_reason, e.logprobs) for e in each] for k, each in events.items()}


def compare(tiny: Bundled, folder: Path, numbers: range, *, longest: int, kv_blocks: int = 400) -> Fleet:
    requests = [mixed_request(number, tiny, longest=longest) for number in numbers]
    alone = answers(run(tiny.engine(kv_gb=400 * BLOCK_GB), requests).events)
    engines = [tiny.engine(kv_gb=kv_blocks * BLOCK_GB, max_running=16) for _ in range(3)]
    fleet = Fleet(folder, engines[:1], engines[1:])
    split = answers(fleet.run(requests))
    fleet.close()
    assert not fleet.failed
    assert split == alone
    return fleet


def test_split_is_colocated(tiny: Bundled, tmp_path: Path) -> None:
    fleet = compare(tiny, tmp_path, range(13), longest=40)
    drafted = {key: each[-1].num_accepted_draft_tokens for key, each in fleet.events.items()}
    assert sum(drafted.values()) > 0, "no draft came true after a hand-over"


def test_also_when_a_decode_worker_is_lost(tiny: Bundled, tmp_path: Path) -> None:
    """Replayed through the decode form, a recovered answer is the same to the bit."""
    requests = [mixed_request(number, tiny, longest=40) for number in range(8)]
    alone = answers(run(tiny.engine(kv_gb=400 * BLOCK_GB), requests).events)
    engines = [tiny.engine(kv_gb=400 * BLOCK_GB) for _ in range(3)]
    fleet = Fleet(tmp_path, engines[:1], engines[1:])
    for request in requests:
        fleet.submit(request)
    while sum(map(len, fleet.events.values())) < 60:
        fleet.turn()
    fleet.lose(WorkerId("decode-0", 1))
    fleet.run_out()
    fleet.close()
    assert not fleet.failed
    assert answers(fleet.events) == alone


@pytest.mark.prove
def test_three_hundred_mixed_requests(tiny: Bundled, tmp_path: Path) -> None:
    compare(tiny, tmp_path, range(300), longest=60)


@pytest.mark.prove
def test_with_little_memory(tiny: Bundled, tmp_path: Path) -> None:
    compare(tiny, tmp_path, range(60), longest=60, kv_blocks=34)
