"""Block names: equal keys mean equal model, namespace and tokens from the first one on; nothing else collides."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripool.cache import block_key, root_key

names = st.text("ab|\0é", max_size=4)
blocks = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)


def chain(model: str, namespace: str, parts: list[list[int]]) -> bytes:
    key = root_key(model, namespace)
    for tokens in parts:
        key = block_key(key, tokens)
    return key


@given(st.lists(st.tuples(names, names, st.lists(blocks, max_size=3)), min_size=2, max_size=8))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_equal_keys_mean_equal_beginnings(chains: list[tuple[str, str, list[list[int]]]]) -> None:
    for one in chains:
        for other in chains:
            assert (chain(*one) == chain(*other)) == (one == other)


def test_names_are_not_glued_together() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")
    assert root_key("ab", "") != root_key("", "ab")
    assert root_key("a", "\0") != root_key("a\0", "")


def test_a_key_depends_on_order_and_parent() -> None:
    root = root_key("m", "")
    assert block_key(root, [1, 2]) != block_key(root, [2, 1])
    assert block_key(block_key(root, [1]), [2]) != block_key(block_key(root, [2]), [1])
    assert block_key(root, [1]) != block_key(root_key("m", "tenant"), [1])


def test_keys_are_the_same_on_every_machine() -> None:
    """Peers find each other's blocks by key: four little-endian bytes per token after the parent, 128 bits out."""
    root = root_key("m", "né")
    salted = struct.pack("<Q", 1) + b"m" + struct.pack("<Q", 3) + "né".encode()
    assert root == blake2b(salted, digest_size=16, person=b"tripool-root").digest()
    expected = blake2b(root + struct.pack("<3I", 7, 2**32 - 1, 0), digest_size=16).digest()
    assert block_key(root, [7, 2**32 - 1, 0]) == expected
    assert len(root) == 16


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_number_that_is_no_token_is_refused_not_wrapped(token: int) -> None:
    with pytest.raises(OverflowError):
        block_key(root_key("m", ""), [token])
