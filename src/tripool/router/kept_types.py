"""Answers that are kept under an idempotency key: what is known of each, and what is said of it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from tripool.core import Request, Usage
from tripool.errors import InvalidRequest, TripoolError
from tripool.router.held import Held, Progress
from tripool.tenants import Caller, Tenant


class KeyReused(InvalidRequest, status=422, code="key_reused"):
    """An idempotency key came with another request than the first time."""


class AnswerNotKept(TripoolError, status=409, code="answer_not_kept"):
    """The answer under an idempotency key is being computed, and too large to be kept for a second reader."""


class AnswerChanged(TripoolError, status=409, code="answer_changed"):
    """An answer had to be computed again, and is not the one of which its client has a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLimits:
    claim_s: float = 60.0
    """From the key of a request to the request."""
    alone_s: float = 30.0
    """How long an answer is computed that nobody reads."""
    kept_s: float = 300.0
    """How long it is kept after its end and its last reader."""
    rejoin_s: float = 1.5
    """After a takeover: how long gateways have to say that somebody reads an answer, and how much of it."""
    answer_tokens: int = 2**17
    """With log-probabilities. A longer answer is not kept."""
    tenant_bytes: int = 8 * 2**20
    all_bytes: int = 64 * 2**20
    free_repeats: int = 16
    """Of one key; each further one counts as a request of its tenant."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A request with an idempotency key, without the key."""

    name: str
    """Digest of tenant and key."""
    answer: str
    """Digest of tenant, key and body: what the answer's ids and seeds come from."""
    created_s: int = 0
    caller: str = ""
    """Prefix of the API key, for the usage log."""


def name_of(tenant: Tenant, key: str) -> str:
    """Of a key: what is kept and sent instead of it."""
    return _digest(tenant.name, key)


def keyed_request(caller: Caller, key: str, api: str, raw: bytes, created_s: int) -> Keyed:
    """`api`, `raw`: what was asked, and how."""
    tenant = caller.tenant
    body = blake2b(raw, digest_size=16, person=b"tripool-body").hexdigest()
    return Keyed(name_of(tenant, key), _digest(tenant.name, key, api, body), created_s, caller.key)


def seed_of(answer: str, place: int) -> int:
    """Of a prompt of a keyed request, where the client gives none: the same for the same request."""
    return int(_digest(answer, str(place), "seed")[:16], 16) >> 1


def _digest(*parts: str) -> str:
    """As long as other ids."""
    digest = blake2b(digest_size=12, person=b"tripool-idem")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Claim:
    """What was first, of a key that may have come before."""

    created_s: int
    model: str = ""
    """Empty: it is the first."""


@dataclass(frozen=True, slots=True)
class Count:
    """Usage to be logged once. The same `id` is the same usage, however often it is said."""

    id: str
    tenant: str
    caller: str
    model: str
    usages: tuple[Usage, ...]
    begins: bool
    """Whether it is the first of its request: others are of an answer that went on after it had been given up."""


@dataclass(frozen=True, slots=True)
class PartState:
    """One prompt's answer in the log: what is there beyond `since` tokens of each choice."""

    place: int
    request_id: str
    request: Request | None
    """None: as said before."""
    over: bool
    """Nothing of it will be computed any more."""
    since: tuple[int, ...]
    held: Held
    num_prompt: int
    num_made: int
    counted_tokens: int
    prompt_counted: bool


@dataclass(frozen=True, slots=True)
class KeptState:
    """One kept answer in the log, whole or what is new of it."""

    keyed: Keyed
    tenant: Tenant
    model: str
    parts: tuple[PartState, ...]
    num_counts: int
    dropped: bool = False


# ---- at the coordinator ----------------------------------------------------------------------------------------------

EACH_BYTES, _PROMPT_BYTES = 512, 8
"""What an answer, and each of its parts, takes beside its tokens; of each token of a prompt."""

State = Literal["claimed", "read", "alone", "ended"]
Name = tuple[str, str]
"""Of a tenant, and of a key."""


@dataclass(slots=True, eq=False)
class Part:
    """One prompt's answer."""

    kept: Kept
    place: int
    request_id: str
    request: Request | None
    """None: nothing of it will be computed any more."""
    progress: Progress
    num_prompt: int
    running: bool = False
    resumes: bool = False
    """It ran under another coordinator, and will here."""
    readers: dict[str, bytes] = field(default_factory=dict)
    """Their lines, by their ids."""
    num_made: int = 0
    counted_tokens: int = 0
    prompt_counted: bool = False
    logged: tuple[int, ...] | None = None
    """How much of each choice the log has; None: nothing."""
    resubmitted: bool = False
    """Its request came again, and the log does not have it."""

    @property
    def num_bytes(self) -> int:
        prompt = len(self.request.prompt_ids) if self.request is not None else 0
        return EACH_BYTES + _PROMPT_BYTES * prompt + self.progress.num_bytes


@dataclass(slots=True, eq=False)
class Kept:
    keyed: Keyed
    tenant: Tenant
    model: str = ""
    parts: dict[int, Part] = field(default_factory=dict)
    """By the places of their prompts."""
    state: State = "claimed"
    since_s: float = 0.0
    num_claims: int = 0
    num_counts: int = 0
    num_bytes: int = 0
    dropped: bool = False

    @property
    def name(self) -> Name:
        return self.tenant.name, self.keyed.name

    @property
    def state_now(self) -> State:
        if any(part.readers for part in self.parts.values()):
            return "read"
        if not self.parts:
            return "claimed"
        return "alone" if any(part.running or part.resumes for part in self.parts.values()) else "ended"


class Start(NamedTuple):
    """A request whose computation begins, or goes on with what there is."""

    part: Part
    request: Request
    held: Held | None


def count_of(kept: Kept) -> Count | None:
    """The usage that was not counted yet. Counts it."""
    usages = []
    for _, part in sorted(kept.parts.items()):
        made, begins = part.num_made - part.counted_tokens, not part.prompt_counted
        if made or begins:
            cached = part.progress.num_cached_tokens or 0
            usages.append(Usage(part.num_prompt, made, cached) if begins else Usage(0, made))
        part.counted_tokens, part.prompt_counted = part.num_made, True
    if not usages:
        return None
    number, kept.num_counts = kept.num_counts, kept.num_counts + 1
    count_id = f"{kept.keyed.answer}.{kept.keyed.created_s}.{number}"
    return Count(count_id, kept.tenant.name, kept.keyed.caller, kept.model, tuple(usages), begins=not number)
