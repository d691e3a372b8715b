"""The frame of a page: words are escaped, and one page's own style comes after what all pages share."""

from __future__ import annotations

import re

from tripool.page import html_page, plots, table, tiles


def test_words_cannot_write_the_page():
    words = "<script>alert(1)</script>"
    page = html_page(words, tiles([(words, words)]) + table([words], [[words], [words]]))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 6


def test_a_page_is_whole_and_shows_its_body_once():
    page = html_page("title", "<p>body</p>" + plots(["<figure></figure>"] * 2), "p{color:red}")
    assert page.startswith("<!doctype html>") and page.endswith("</body></html>\n")
    assert page.count("<p>body</p>") == 1 and page.count("<figure>") == 2
    assert page.index("prefers-color-scheme:dark") < page.index("p{color:red}") < page.index("</style>")


def test_a_table_keeps_its_order():
    shown = table(["a", "b"], [["1", "2"], ["3", "4"]])
    assert re.findall(r">(\w)<", shown) == ["a", "b", "1", "2", "3", "4"]
