"""Requests of tenants who try to find what others have cached, and an oracle of what each may find.

The oracle knows nothing of keys or hashes: per owner (a tenant, and the salt it added) it remembers which beginnings,
in whole blocks, that owner has had computed. Of tenants that share public prefixes it also knows the system prompts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tripool.cache import PUBLIC_NAMESPACE
from tripool.core import BLOCK_TOKENS, SALT_MARK
from tripool.engine.fake import fake_text
from tripool.tenants import Tenant
from tripool.text import Tokenizer

Owner = tuple[str, ...]
TOKENIZER = Tokenizer(fake_text())
SYSTEMS = [f"You are number {i}. " + "Answer briefly and say nothing else. " * (2 + i) for i in range(3)]


@dataclass(frozen=True)
class Attack:
    tenant: str
    route: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt_ids: tuple[int, ...]
    public_tokens: int

    @property
    def owner(self) -> Owner:
        salt = self.body.get("cache_salt")
        return (self.tenant,) if salt is None else (self.tenant, salt)

    @property
    def num_public(self) -> int:
        return self.public_tokens // BLOCK_TOKENS


@dataclass
class Oracle:
    known: dict[tuple[Owner, int], set[tuple[int, ...]]] = field(default_factory=dict)
    """By owner, and by how many leading blocks are public (those are another owner's): beginnings in whole blocks."""

    def _places(self, attack: Attack) -> list[set[tuple[int, ...]]]:
        """For each full block of the prompt that may be found, where it is remembered."""
        num_blocks = (len(attack.prompt_ids) - 1) // BLOCK_TOKENS  # the last token is always computed
        return [self._of(attack, number) for number in range(num_blocks)]

    def _of(self, attack: Attack, number: int) -> set[tuple[int, ...]]:
        public = number < attack.num_public
        place: tuple[Owner, int] = ((), 0) if public else (attack.owner, attack.num_public)
        return self.known.setdefault(place, set())

    def cached(self, attack: Attack) -> int:
        count = 0
        for number, place in enumerate(self._places(attack)):
            if attack.prompt_ids[: (number + 1) * BLOCK_TOKENS] not in place:
                break
            count += 1
        return count * BLOCK_TOKENS

    def computed(self, attack: Attack, answer: Sequence[int]) -> None:
        """The newest token's KV is never computed."""
        tokens = (*attack.prompt_ids, *answer[:-1])
        for number in range(len(tokens) // BLOCK_TOKENS):
            self._of(attack, number).add(tokens[: (number + 1) * BLOCK_TOKENS])


class Adversary:
    """Draws attacks from a seed. `tenants`: as in the key store, namespaces too: guessing right must not help."""

    def __init__(self, seed: int, tenants: Mapping[str, Tenant], keys: Mapping[str, str]) -> None:
        self._rng = random.Random(seed)
        self._tenants, self._keys = tenants, keys
        self._names = [name for name in tenants if name in keys and name != "admin"]
        self._shared = [[4 + self._rng.randrange(240) for _ in range(64 * 5)] for _ in range(4)]
        spaces = [tenant.namespace for tenant in tenants.values()]
        self._guesses = [
            *self._names,
            *spaces,
            *(SALT_MARK + space for space in spaces),
            *(space + SALT_MARK for space in spaces),
            *(key[:11] for key in keys.values()),
            *(PUBLIC_NAMESPACE, SALT_MARK, "public", "x"),
        ]

    def next(self) -> Attack:
        rng = self._rng
        name = rng.choice(self._names)
        victim = self._tenants[rng.choice(self._names)]
        body: dict[str, Any] = {
            "max_tokens": rng.choice([1, 3]),
            "seed": 1,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        if rng.random() < 0.4:
            body["cache_salt"] = rng.choice(self._guesses)
        for lure in ("user", "session_id", "prompt_cache_key", "safety_identifier"):
            if rng.random() < 0.3:
                body[lure] = rng.choice([victim.name, victim.namespace])
        if rng.random() < 0.3:
            body["request_id"] = rng.choice([victim.name, "same"])
        chat = rng.random() < 0.5
        prompt, public = self._chat(body, self._tenants[name]) if chat else self._completion(body)
        route = "/v1/chat/completions" if chat else "/v1/completions"
        return Attack(name, route, body, self._headers(name, victim), prompt, public)

    def _headers(self, name: str, victim: Tenant) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self._keys[name]}"}
        lures = ("X-Tenant", "X-Namespace", "X-User-Id", "OpenAI-Organization", "OpenAI-Project", "X-Forwarded-User")
        for lure in lures:
            if self._rng.random() < 0.2:
                headers[lure] = self._rng.choice([victim.name, victim.namespace])
        if self._rng.random() < 0.2:
            headers["x-api-key"] = self._keys[victim.name][:20]
        return headers

    def _completion(self, body: dict[str, Any]) -> tuple[tuple[int, ...], int]:
        family = self._rng.choice(self._shared)
        own = [4 + self._rng.randrange(240) for _ in range(self._rng.choice([1, 5, 70]))]
        body["prompt"] = family[: self._rng.choice([64, 128, 200, 256, 320])] + own
        return tuple(body["prompt"]), 0

    def _chat(self, body: dict[str, Any], tenant: Tenant) -> tuple[tuple[int, ...], int]:
        system = self._rng.choice(SYSTEMS)
        text = self._rng.choice(["Hello", "Tell me all about the pool. " * 8])
        body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        prompt = tuple(TOKENIZER.encode(f"<|system|>{system}<|end|><|user|>{text}<|end|><|assistant|>", special=False))
        shares = tenant.public_prefix and "cache_salt" not in body
        alone = TOKENIZER.encode(f"<|system|>{system}", special=False)
        assert tuple(alone) == prompt[: len(alone)]
        return prompt, len(alone) if shares else 0
