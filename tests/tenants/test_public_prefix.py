"""The shared public prefix: opt-in, system prompts only, and a public block is a function of public tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripool.cache import PUBLIC_NAMESPACE, block_key, namespace_ranges, next_key, root_key
from tripool.engine.fake import fake_text
from tripool.gateway.encoding import public_tokens
from tripool.text import Tokenizer

from .serving import Guarded, bearer, guarded_server, make_keys

SIZE = 4


def chain(tokens: list[int], namespace: str, num_public: int, model: str = "m") -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        block = tokens[start : start + SIZE]
        keys.append(next_key(keys, block, model=model, namespace=namespace, num_public=num_public))
    return keys


TOKENS = st.lists(st.integers(0, 3), min_size=SIZE, max_size=6 * SIZE)
SPACES = st.sampled_from(["", "a", "b", "a\x1fb", PUBLIC_NAMESPACE + "x"])


@given(TOKENS, TOKENS, SPACES, SPACES, st.integers(0, 4), st.integers(0, 4))
def test_two_blocks_have_one_key_only_if_both_are_public_or_of_one_owner(
    mine: list[int], theirs: list[int], my_space: str, their_space: str, my_public: int, their_public: int
) -> None:
    my_keys, their_keys = chain(mine, my_space, my_public), chain(theirs, their_space, their_public)
    for i, my_key in enumerate(my_keys):
        for j, their_key in enumerate(their_keys):
            same_tokens = i == j and mine[: (i + 1) * SIZE] == theirs[: (j + 1) * SIZE]
            both_public = i < my_public and j < their_public
            one_owner = my_space == their_space and my_public == their_public
            assert (my_key == their_key) == (same_tokens and (both_public or one_owner))


@given(TOKENS, SPACES)
def test_without_public_blocks_keys_are_as_ever(tokens: list[int], namespace: str) -> None:
    parent, expected = root_key("m", namespace), []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = block_key(parent, tokens[start : start + SIZE])
        expected.append(parent)
    assert chain(tokens, namespace, 0) == expected


@given(st.integers(0, 6), st.integers(0, 6))
def test_stretches_cover_every_block_once(num_public: int, num_blocks: int) -> None:
    parts = namespace_ranges("a", num_public, num_blocks)
    assert [i for _, first, stop in parts for i in range(first, stop)] == list(range(num_blocks))
    for name, first, stop in parts:
        assert first < stop and (name == PUBLIC_NAMESPACE) == (stop <= num_public)


def tokenizer(template: str | None = None) -> Tokenizer:
    text = fake_text()
    return Tokenizer(text if template is None else replace(text, chat_template=template))


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def count(model: Tokenizer, *messages: dict[str, str]) -> int:
    return public_tokens(model, list(messages), model.encode_chat(list(messages)))


def test_it_ends_with_the_system_message() -> None:
    model = tokenizer()
    alone = len(model.encode("<|system|>Be kind", special=False))
    assert count(model, say("system", "Be kind"), say("user", "secret")) == alone
    assert count(model, say("user", "Be kind"), say("system", "late")) == 0, "not the first message"
    assert count(model, say("user", "secret")) == 0


@pytest.mark.parametrize(
    ("template", "public"),
    [
        # What others say before it, in it and behind it is not public, wherever a template puts it.
        ("{{ messages[-1].content }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", ""),
        ("{{ messages[0].content }}|{{ messages|length }}|{{ messages[-1].content }}", "Be kind"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", ""),
        ("{{ raise_exception('no user') if messages|length < 2 }}{{ messages[0].content }}", ""),
        ("{% for m in messages if m.role == 'user' %}{{ messages[0].content }}{{ m.content }}{% endfor %}", ""),
    ],
)
def test_templates_that_mix_messages_make_nothing_of_others_public(template: str, public: str) -> None:
    model = tokenizer(template)
    assert count(model, say("system", "Be kind"), say("user", "secret")) == len(model.encode(public, special=False))


def test_tools_and_options_are_not_public() -> None:
    template = "{{ tools }}{{ secret }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = tokenizer(template)
    messages = [say("system", "Be kind"), say("user", "x")]
    prompt = model.encode_chat(messages, tools=[{"name": "mine"}], extra={"secret": "s"})
    assert public_tokens(model, messages, prompt) < len(model.encode("Be", special=False))


SYSTEM = "You are a careful assistant. " * 12


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., int]]:
    path = tmp_path / "keys.db"
    keys = make_keys(path, "shy", "hidden", "admin") | make_keys(
        path, "open", "frank", settings={"public_prefix": True}
    )

    def cached(server: Guarded, name: str, user: str, **more: Any) -> int:
        body = {"messages": [say("system", SYSTEM), say("user", user)], "max_tokens": 2, **more}
        answer = server.http.post("/v1/chat/completions", json=body, headers=bearer(keys[name])).raise_for_status()
        tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    with guarded_server(path) as server:
        yield lambda name, user, **more: cached(server, name, user, **more)


def test_who_opted_in_shares_system_prompts_and_nothing_else(ask: Callable[..., int]) -> None:
    model = tokenizer()
    whole_blocks = len(model.encode(f"<|system|>{SYSTEM}", special=False)) // 64 * 64
    long_user = "tell me everything " * 20
    assert whole_blocks >= 128
    assert ask("open", long_user) == 0
    assert ask("shy", long_user) == 0, "did not opt in"
    assert ask("frank", long_user) == whole_blocks, "the system prompt, not the same user message behind it"
    assert ask("frank", long_user) > whole_blocks, "its own"
    assert ask("open", long_user) > whole_blocks
    assert ask("hidden", long_user) == 0
    assert ask("frank", long_user, cache_salt="apart") == 0, "a salt is a wish to be apart"
    assert ask("frank", long_user, cache_salt="apart") > whole_blocks
