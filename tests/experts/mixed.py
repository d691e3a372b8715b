"""Mixed requests for ranks: every kind of answer, on engines with plenty of KV and on engines with far too little.

Prompts share beginnings of more than a block; see `engine.mtp_traffic` for what they must not contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from engine.mtp_traffic import SETTINGS, Bundled, mixed_request, run
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.engine import Engine
from tripool.text import Tokenizer

Answers = dict[tuple[str, int], list[tuple[object, ...]]]
TINY = "tiny"
_PLAIN = [settings for settings in SETTINGS if "structure" not in settings]
"""Grammars need the words of a real tokenizer."""
_CROWDED_BLOCKS, _ROOMY_BLOCKS = 5.9, 200


@cache
def bundled(engine: Engine) -> Bundled:
    return Bundled(engine.executor.runner.model, engine.text, Tokenizer(engine.text))


def fresh(engine: Engine, *, crowded: bool = False, piece_tokens: int = 76) -> Engine:
    """Another engine over the same weights. Crowded: prompts in pieces, preemptions, drafts without room."""
    config: dict[str, Any] = {"max_running": 6, "step_tokens": piece_tokens} if crowded else {"max_running": 24}
    kv_gb = (_CROWDED_BLOCKS if crowded else _ROOMY_BLOCKS) * engine.block_bytes / 2**30
    return Engine(engine.name, engine.executor.runner.model, engine.text, EngineConfig(kv_gb=kv_gb, **config))


def request(engine: Engine, number: int, longest: int) -> Request:
    made = _request(engine, number, longest)
    if number % 5 != 4:
        return made
    return replace(made, params=replace(made.params, prompt_logprobs=number % 3))  # without the prefix cache


def _request(engine: Engine, number: int, longest: int) -> Request:
    if engine.name == TINY:
        return mixed_request(number, bundled(engine), longest=longest)
    random, vocab = Random(number), engine.vocab
    beginnings = [[(7 * i + k) % (vocab - 6) + 6 for i in range(size)] for k, size in enumerate((0, 70, 140))]
    prompt = [*random.choice(beginnings), *(random.randrange(6, vocab) for _ in range(random.choice((1, 5, 30, 60))))]
    params = _PLAIN[number % len(_PLAIN)] | {"max_tokens": random.randint(1, longest)}
    if "logit_bias" in params:
        params["logit_bias"] = {17: 2.0, 100: -5.0}
    params["ignore_eos"] = random.random() < 0.5
    return Request(
        id=str(number), prompt_ids=tuple(prompt), params=SamplingParams(**params), seed=number, end_ids=frozenset({1})
    )


def mixed_run(
    engine: Engine, numbers: Sequence[int], longest: int, crowded: bool = False, **pieces: int
) -> tuple[Answers, Counter[str]]:
    """Everything that callers see, and how often what the requests are made for has happened; no block is left held."""
    used = fresh(engine, crowded=crowded, **pieces)
    told = run(used, [request(engine, number, longest) for number in numbers])
    events = [event for each in told.events.values() for event in each]
    happened = Counter(
        drafts=used.scheduler.num_drafted,
        accepted=used.scheduler.num_accepted,
        preemptions=used.scheduler.num_preemptions,
        hits=sum(event.num_cached_tokens > 0 for event in events),
        scores=sum(event.logprobs is not None for event in events),
        prompt_scores=sum(event.prompt_logprobs is not None for event in events),
    )
    return told.answers(), happened


def mixed_answers(engine: Engine, numbers: Sequence[int], longest: int, crowded: bool = False) -> Answers:
    return mixed_run(engine, numbers, longest, crowded)[0]
