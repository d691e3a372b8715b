"""A split server with a disk behind its cache: what it knew before it was stopped, it knows when it starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .serving import split_server
from .test_cache import ask, cached

PROMPT = [4 + i % 199 for i in range(10 * 64 + 1)]


def on_disk(pools: dict[str, Any]) -> int:
    return sum(member["disk"]["blocks"] for member in pools["cache"] if not member["away"] and member["disk"])


@pytest.mark.prove
def test_the_next_server_starts_with_the_blocks_of_the_last(tmp_path: Path) -> None:
    options = ("--cache-gb", "0.005", "--disk-gb", "0.1", "--disk-dir", str(tmp_path))
    for known, told in ((0, "0 tokens"), (640, "640 tokens (0 from memory, 640 from disk)")):
        with split_server("fake", prefill=1, decode=1, options=options) as server:
            server.wait(lambda pools: [(m.get("disk") or {}).get("state") for m in pools["cache"]] == ["on", "on"])
            answer = ask(server, PROMPT)
            assert cached(answer) == known
            explained = server.http.get(f"/v1/requests/{answer['id']}/explain").raise_for_status().json()
            assert explained["placement"][0]["fetched from the cache pool"] == told
            server.wait(lambda pools: on_disk(pools) >= 10)


def test_without_room_the_server_serves_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ("--cache-gb", "0.005", "--disk-gb", "0.1", "--disk-dir", str(tmp_path / "file"))
    with split_server("fake", prefill=1, decode=1, options=options) as server:
        server.wait(lambda pools: all((m.get("disk") or {}).get("state", "").startswith("off") for m in pools["cache"]))
        assert cached(ask(server, PROMPT)) == 0
        assert any("the disk tier is off" in line for line in server.log)
