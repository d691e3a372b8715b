"""The types that every room shares: requests, sampling parameters, token events, usage. No tensor, clock or socket."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from tripool.errors import InvalidRequest

BLOCK_TOKENS = 64
"""Tokens in one KV block: the unit of paging, prefix reuse and KV transfer."""

SALT_MARK = "\x1f"
"""Separates a namespace's owner from the salt that a client adds to it. No owner's own namespace contains it."""


def owner(namespace: str) -> str:
    """The tenant's own namespace, without a client's salt."""
    return namespace.partition(SALT_MARK)[0]


MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 64, 4096, 1024
"""Bounds of stop conditions: each is checked for every choice, and travels with every prompt."""
MAX_SLO_MS = 1e12
GREEDY_BELOW = 1e-5
"""Temperatures below it count as 0: noise could not change a choice, and logits divided by it could overflow."""

FinishReason = Literal["stop", "length", "abort"]

StructureKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "tool_calls"]

MAX_STRUCTURE_BYTES = 2**16
MAX_STRUCTURE_DEPTH = 64
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an answer must have: `Structure("json_schema", {"type": "object", ...})`.

    | kind | value |
    |---|---|
    | json_schema | the schema: an object, or its JSON text |
    | json_object | nothing: any JSON object |
    | regex | matched by the whole answer |
    | ebnf | a grammar, Lark's (`start: ...`) or GBNF (`root ::= ...`) |
    | choice | the strings to choose from |
    | tool_calls | which functions may be called, and whether one must be: see `tripool.grammar.tools` |
    """

    kind: StructureKind
    value: Any = ""
    """Stored as text, or as a tuple of strings for `choice`: equal structures are compiled once."""
    param: str = field(default="structure", compare=False)
    """The caller's name for it, used in errors."""

    def __post_init__(self) -> None:
        value = self.value
        if self.kind in ("json_schema", "tool_calls"):
            value = self._json_text(value)
        elif self.kind == "json_object":
            if value not in ("", True):
                raise InvalidRequest("json_object must be true", param=self.param)
            value = ""
        elif self.kind == "choice":
            value = self._choices(value)
        elif self.kind not in get_args(StructureKind):
            hint = f"known: {', '.join(get_args(StructureKind))}"
            raise InvalidRequest(f"unknown structure {str(self.kind)[:100]!r}", hint=hint, param=self.param)
        elif not isinstance(value, str) or not value:
            raise InvalidRequest(f"the {self.kind} is not a string, or is empty", param=self.param)
        texts = value if isinstance(value, tuple) else (value,)
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the {self.kind} holds a lone surrogate", param=self.param) from error
        if size > MAX_STRUCTURE_BYTES:
            hint = f"at most {MAX_STRUCTURE_BYTES} bytes"
            raise InvalidRequest(f"the {self.kind} has {size} bytes", hint=hint, param=self.param)
        object.__setattr__(self, "value", value)

    @classmethod
    def of(cls, option: Mapping[str, Any], *, param: str = "structure") -> Structure:
        """From an object with one entry, as in options: `{"regex": "[a-z]+"}`, `{"json_object": true}`."""
        if len(option) != 1:
            hint = f"one of {', '.join(get_args(StructureKind))}"
            raise InvalidRequest(f"{param} has {len(option)} kinds", hint=hint, param=param)
        ((kind, value),) = option.items()
        return cls(cast(StructureKind, kind), value, param)

    def _json_text(self, value: object) -> str:
        """The same JSON on one line. Keys keep their order, because answers follow it."""
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
            if not isinstance(parsed, Mapping):
                raise InvalidRequest(f"the {self.kind} is not an object", param=self.param)
            text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
            too_deep = _depth(parsed) > MAX_STRUCTURE_DEPTH
        except RecursionError:
            too_deep = True
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the {self.kind} is not JSON: {error}", param=self.param) from error
        if too_deep:
            hint = f"at most {MAX_STRUCTURE_DEPTH} levels"
            raise InvalidRequest(f"the {self.kind} is nested too deeply", hint=hint, param=self.param)
        return text

    def _choices(self, value: object) -> tuple[str, ...]:
        texts = tuple(value) if isinstance(value, (list, tuple)) else ()
        if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in texts):
            hint = f"must be 1 to {MAX_CHOICES} strings, none of them empty"
            raise InvalidRequest("choice is of the wrong shape", hint=hint, param=self.param)
        return texts


def _depth(value: object) -> int:
    """Levels of nesting; may reach the recursion limit."""
    if isinstance(value, Mapping):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled and when to stop. By default: until the model ends the answer or the context is full."""

    temperature: float = 1.0
    """0 picks the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 (or -1) considers every token."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """k: return the log-probability of each sampled token and of the k most likely ones. None: return none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens but the first. It is computed for them, without the prefix cache."""
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structure: Structure | None = None
    """The form that the answer must have. It takes precedence over penalties, bias and `min_tokens`."""

    def __post_init__(self) -> None:
        if isinstance(self.structure, Mapping):
            object.__setattr__(self, "structure", Structure.of(self.structure))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}", hint="must be a list", param=name)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check()
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    def _check(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, above=True)
        _whole("top_k", self.top_k, 0, 2**31)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _whole("n", self.n, 1, 128)
        _whole("min_tokens", self.min_tokens, 0, 2**31)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest("min_tokens is above max_tokens", param="min_tokens")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidRequest(f"{flag} is {getattr(self, flag)!r}", hint="must be true or false", param=flag)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest("stop must hold non-empty strings", param="stop")
        if len(self.stop) > MAX_STOPS or sum(map(len, self.stop)) > MAX_STOP_CHARS:
            hint = f"at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters in all"
            raise InvalidRequest("stop is too long", hint=hint, param="stop")
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > 1024:
            hint = "must map at most 1024 token ids to numbers"
            raise InvalidRequest("logit_bias is of the wrong shape", hint=hint, param="logit_bias")
        for token, value in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**31)
            _in_range("logit_bias", value, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            hint = f"at most {MAX_STOP_IDS}"
            raise InvalidRequest(f"stop_token_ids holds {len(self.stop_token_ids)}", hint=hint, param="stop_token_ids")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31)
        if self.structure is not None and not isinstance(self.structure, Structure):
            hint = 'must be a Structure, or like {"json_schema": {...}}'
            raise InvalidRequest(f"structure is a {type(self.structure).__name__}", hint=hint, param="structure")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """From a dict of option names, as on a command line or in a JSON body; an unknown name is an error."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                hint = f"known options: {', '.join(sorted(known))}"
                raise InvalidRequest(f"unknown sampling option '{name}'", hint=hint, param=name)
        try:
            return cls(**options)
        except TypeError as error:  # e.g. a comparison with a string in place of a number
            raise InvalidRequest(f"a sampling option has the wrong type: {error}") from error


def _in_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """`above` excludes the lower end. Rejects bools, NaN (which fails every comparison) and non-numbers."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value <= high if above else low <= value <= high):
        hint = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
        raise InvalidRequest(f"{name} is {value!r}", hint=hint, param=name)


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}", hint="must be a whole number", param=name)
    _in_range(name, value, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives and tenant of a request. They decide when and where it runs, never which tokens it gets."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    """Longest mean time per output token after the first, and time to the first. None: best effort."""
    priority: int = 0
    """Lower goes first among the requests of one tenant."""
    tenant: str = ""
    """Name of the key's owner; empty where the server has no keys."""
    weight: float = 1.0
    """Weight of the tenant's share while tenants compete."""
    job: str = ""
    """Id of the HTTP request that this prompt is part of: its prompts share one slice of the tenant's share."""
    background: bool = False
    """Runs only while no other request has work (`engine/background.py`)."""

    def __post_init__(self) -> None:
        for name, value in (("tpot_ms", self.tpot_ms), ("ttft_ms", self.ttft_ms)):
            if value is not None and not 0 <= value <= MAX_SLO_MS:  # also false for NaN
                raise InvalidRequest(f"{name} is not a valid time", param=name)
        if not 0 < self.weight < float("inf"):
            raise InvalidRequest(f"weight is {self.weight!r}", hint="must be above 0", param="weight")

    @property
    def group(self) -> tuple[str, str]:
        """The unit of fair sharing: tenant and HTTP request."""
        return self.tenant, self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with everything that determines its answer: the same request gives the same tokens anywhere."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The client's, or one drawn by the gateway."""
    end_ids: frozenset[int] = frozenset()
    """The model's own end-of-text tokens."""
    namespace: str = ""
    """Salt of the prefix cache: namespaces share public blocks only. The owner, `SALT_MARK` and a client's own salt."""
    public_tokens: int = 0
    """Leading prompt tokens that are not secret: their full blocks are shared between all namespaces."""
    slo: Slo = Slo()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer once it has `min_tokens`."""
        ends = frozenset() if self.params.ignore_eos else self.end_ids
        stops = self.params.stop_token_ids
        return ends | frozenset(stops) if stops else ends


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the likeliest ones, before temperature and filters."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Stages:
    """Time that a choice spent in each stage before its first token, by its worker. Not frozen, like `TokenEvent`."""

    queue_s: float = 0.0
    """From submission until the first work on it."""
    lookup_s: float = 0.0
    """Lookup of its prefix in the cache pool, and the fetch of the blocks found."""
    prefill_s: float = 0.0
    """From the first work on it to its first token, including other requests' shares of those steps."""
    transfer_s: float = 0.0
    """KV transfer to the decode worker."""
    fetched_tokens: int = 0
    """Prompt tokens whose KV came from the cache pool."""
    disk_tokens: int = 0
    """Of those, tokens whose blocks were only on disk at lookup."""


@dataclass(slots=True)
class TokenEvent:
    """One generated token of one choice of one request. `index` counts from 0 within the choice.

    Never changed, but not frozen: hundreds are made in a step, and a frozen one takes five times as long.
    """

    request_id: str
    choice: int
    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; the same in every event of a request."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    """Drafts verified for this choice so far, and how many of them were accepted."""
    stages: Stages | None = None
    """On a choice's first event. A transfer after the first token is reported by a later event, alone."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """On a request's first event, if they are wanted: of the prompt's second token and those after it."""

    def of_request(self, request_id: str, stages: Stages | None) -> TokenEvent:
        """As `replace`, in a fraction of the time: workers call it for every token."""
        facts = (self.choice, self.index, self.token_id, self.finish_reason, self.logprobs, self.num_cached_tokens)
        drafts = (self.num_draft_tokens, self.num_accepted_draft_tokens)
        return TokenEvent(request_id, *facts, *drafts, stages, self.prompt_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStats:
    """Load and counters of a backend. Counters start at 0 with the process and never decrease."""

    running: int = 0
    """Choices that are being computed."""
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks held by running choices, 0 to 1."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts verified, and how many of them were accepted."""
    stalled_s: float = 0.0
    """Seconds since the last finished step while there is work; 0 without work."""
    missing: str = ""
    """What the backend lacks and cannot answer without, e.g. a worker of one role."""
    held_by: str = ""
    """Limit that keeps the oldest waiting request from running; empty when none waits."""
    slo_ceiling: int | None = None
    """Choices that may run at once within the TPOT objectives. None: no objective bounds them."""
    slo_held_back: bool = False
    """Whether a request waits only because of a TPOT objective."""
    predicted_step_ms: float = 0.0
    """Predicted time of the last step; below it, the mean error of such predictions."""
    step_error_ms: float = 0.0
    num_slos_given_up: int = 0
    """TPOT objectives that were missed beyond repair, or could never be met."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    """Drafted by the model's MTP layer and verified; each accepted one saved a step."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


Message = Mapping[str, Any]
Conversation = Sequence[Message]
