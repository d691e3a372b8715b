from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tripool.text.stops import StopFinder, StopHit

letters = st.text("ab\n", min_size=1, max_size=5)
stop_lists = st.lists(letters, max_size=4)


def occurrences(text: str, stops: list[str]) -> list[tuple[int, int, str]]:
    """(start, end, stop) of every occurrence, the slow way."""
    return [(at, at + len(s), s) for s in stops for at in range(len(text)) if text.startswith(s, at)]


@given(stops=stop_lists, pieces=st.lists(st.text("ab\n", max_size=6), max_size=6))
@example(stops=["abab", "b"], pieces=["a", "ba", "b"])
@example(stops=["ab", "abab"], pieces=["abab"])
@settings(max_examples=250, deadline=None, derandomize=True)
def test_finds_what_a_search_of_the_whole_text_finds(stops: list[str], pieces: list[str]) -> None:
    finder = StopFinder(stops)
    state, text = 0, ""
    for piece in pieces:
        before = len(text)
        text += piece
        state, hit = finder.advance(state, piece)
        new = [found for found in occurrences(text, stops) if found[1] > before]
        if not new:
            assert hit is None
        else:
            start, end, stop = min(new)
            assert hit == StopHit(stop, start - before, end - before)


@given(stops=stop_lists, text=st.text("ab\n", max_size=12))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_holds_exactly_the_longest_end_that_may_become_a_stop(stops: list[str], text: str) -> None:
    finder = StopFinder(stops)
    state, _ = finder.advance(0, text)
    beginnings = {stop[:i] for stop in stops for i in range(len(stop))}
    expected = max((n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings), default=0)
    assert finder.held_chars(state) == expected


def test_an_old_state_can_be_taken_up_again() -> None:
    finder = StopFinder(["stop"])
    state, _ = finder.advance(0, "st")
    assert finder.advance(state, "xx")[1] is None
    assert finder.advance(state, "op")[1] == StopHit("stop", -2, 2)
