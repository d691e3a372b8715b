"""docs/clients.md is what the last runs of the clients' programs saw."""

from __future__ import annotations

from clients.table.page import PAGE, page, read


def test_the_page_is_what_was_seen() -> None:
    assert PAGE.read_text("utf-8") == page(read())
