"""Drafts on the bundled model, on the exact path: the same text with and without, whatever happens to a request."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from tripool.core import Request, SamplingParams
from tripool.engine.engine import Engine
from tripool.engine.runner import Runner
from tripool.kernels import CPU, CPU8
from tripool.sequence import Seq, Work

from .mtp_traffic import (
    BLOCK_GB,
    CROWDED,
    ROOMY,
    Bundled,
    Told,
    ask,
    bundled,
    check_published,
    listen,
    mixed_request,
    run,
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bundled]:
    with bundled(CPU8) as model:
        yield model


# ---- the text ------------------------------------------------------------------------------------------------------


def same_with_and_without(tiny: Bundled, numbers: range, longest: int, config: dict[str, float]) -> None:
    requests = [mixed_request(number, tiny, longest=longest) for number in numbers]
    with_drafts, without = tiny.engine(**config), tiny.engine(**config, mtp=False)
    with_drafts.executor.runner.kv.fill_(float("nan"))  # whatever is read without having been written would show
    told, expected = run(with_drafts, requests), run(without, requests)
    assert told.answers() == expected.answers()
    assert without.scheduler.num_drafted == 0
    assert with_drafts.scheduler.num_accepted > 0.3 * with_drafts.scheduler.num_drafted > 50
    for engine in (with_drafts, without):
        assert (engine.scheduler.num_preemptions > len(requests) / 20) == (config is CROWDED)
    hits = [events[0].num_cached_tokens for events in told.events.values()]
    assert sum(hit > 0 for hit in hits) > len(hits) / 20
    counted = [each[-1] for each in told.events.values()]
    assert sum(event.num_draft_tokens for event in counted) == with_drafts.scheduler.num_drafted
    assert sum(event.num_accepted_draft_tokens for event in counted) == with_drafts.scheduler.num_accepted
    check_published(with_drafts)


@pytest.mark.parametrize(("first", "config"), [(0, CROWDED), (30, ROOMY)], ids=["crowded", "roomy"])
def test_the_same_text_with_and_without_drafts(tiny: Bundled, first: int, config: dict[str, float]) -> None:
    same_with_and_without(tiny, range(first, first + 30), 24, config)


@pytest.mark.prove
@pytest.mark.parametrize("config", [CROWDED, ROOMY], ids=["crowded", "roomy"])
def test_the_same_text_with_and_without_drafts_over_200_requests(tiny: Bundled, config: dict[str, float]) -> None:
    same_with_and_without(tiny, range(1000, 1200), 60, config)


def test_one_step_may_end_an_answer_with_its_first_or_its_second_token(tiny: Bundled) -> None:
    """Every length of answer, and every place where a stop token can fall."""
    [plain] = run(tiny.engine(mtp=False), [ask(tiny, 3, max_tokens=12)]).tokens().values()
    lengths = [({"max_tokens": length}, length, "length") for length in range(1, 13)]
    stops = [({"max_tokens": 12, "stop_token_ids": [token]}, plain.index(token) + 1, "stop") for token in set(plain)]
    for params, length, reason in lengths + stops:
        [events] = run(tiny.engine(), [ask(tiny, 3, **params)]).events.values()
        assert [event.token_id for event in events] == plain[:length]
        assert [event.finish_reason for event in events] == [None] * (length - 1) + [reason]


def test_cancelled_at_any_step(tiny: Bundled) -> None:
    """The others say what they say alone, and everything is given back."""
    random = Random(5)
    requests = [mixed_request(number, tiny, longest=20) for number in range(200, 212)]
    engine = tiny.engine(**CROWDED)
    expected = run(tiny.engine(**CROWDED), requests).tokens()
    told = listen(engine)
    for request in requests:
        engine.add(request)
    gone = set()
    while engine.busy:
        if random.random() < 0.15:
            gone.add(number := str(random.randrange(200, 212)))
            engine.cancel(number)
            engine.scheduler.check()
        for event in engine.step():
            told.events.setdefault((event.request_id, event.choice), []).append(event)
    assert engine.scheduler.pool.num_held == 0
    assert 2 <= len(gone) < 12
    for key, tokens in expected.items():
        said = told.tokens().get(key, [])
        assert said == tokens[: len(said)]
        assert key[0] in gone or said == tokens


@pytest.mark.prove
def test_float32_differs_only_where_two_tokens_are_equally_likely() -> None:
    """Two rows in one product are added up in another order than one row: drafts may turn a tie, and nothing else."""
    with bundled(CPU) as tiny:
        requests = [ask(tiny, number, max_tokens=40) for number in range(6)]
        told, expected = run(tiny.engine(), requests).tokens(), run(tiny.engine(mtp=False), requests).tokens()
        for request in requests:
            ours, theirs = told[request.id, 0], expected[request.id, 0]
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                runner = Runner(tiny.model, num_blocks=4)
                known = [*request.prompt_ids, *ours[:at]]
                logits = runner.logits(runner.hidden([Work(known, 0, [0, 1, 2, 3], False)])[-1:])[0]
                assert abs(float(logits[ours[at]] - logits[theirs[at]])) < 1e-3


# ---- the drafts ----------------------------------------------------------------------------------------------------


def test_drafts_of_the_first_ids_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a larger vocabulary: the same text, and none beyond them but what a grammar leaves no choice about."""
    monkeypatch.setattr("tripool.models.decoder._DRAFT_TOKENS", 1024)
    with bundled(CPU8) as tiny:
        requests = [mixed_request(number, tiny, longest=24) for number in range(300, 326)]
        engine = tiny.engine(**ROOMY)
        told = run(engine, requests, listen(engine))
        assert told.answers() == run(tiny.engine(**ROOMY, mtp=False), requests).answers()
        free = {request.id for request in requests if request.params.structure is None}
        first = tiny.model.arch.vocab // 4
        assert max(draft for (request, *_), draft in told.drafts.items() if request in free) < first
        assert max(token for each in told.tokens().values() for token in each) >= first
        assert engine.scheduler.num_accepted > 0.3 * engine.scheduler.num_drafted > 30


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_most_drafts_of_its_own_text_come_true_and_save_a_step_each(tiny: Bundled, temperature: float) -> None:
    drafted = accepted = 0
    for number in range(4):
        engine = tiny.engine()
        engine.add(ask(tiny, number, temperature=temperature))
        num_steps = 0
        while engine.busy:
            engine.step()
            num_steps += 1
        assert num_steps == 60 - engine.scheduler.num_accepted
        drafted += engine.scheduler.num_drafted
        accepted += engine.scheduler.num_accepted
    print(f"tiny, temperature {temperature}: {accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})")
    assert accepted > 0.5 * drafted


@pytest.fixture(scope="module")
def long_ones(tiny: Bundled) -> list[Request]:
    """Most of them outgrow their block soon, or are longer than a chunk."""
    repeats = (20, 23, 80, 24, 22, 0, 25)
    return [
        ask(tiny, number, repeat=repeat, n=1 + number % 2, temperature=0.7, max_tokens=30)
        for number, repeat in enumerate(repeats)
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny: Bundled, long_ones: list[Request]) -> Told:
    """Each alone in an engine of its own, its prompt in one piece."""
    told = Told()
    for request in long_ones:
        engine = tiny.engine(prefix_reuse=False)
        alone = run(engine, [request], listen(engine))
        told.events |= alone.events
        told.drafts |= alone.drafts
    return told


@pytest.mark.parametrize(
    "config",
    [{"max_running": 6, "step_tokens": 76}, {"max_running": 6, "step_tokens": 76, "kv_gb": 5.9 * BLOCK_GB}],
    ids=["in chunks", "preempted"],
)
def test_a_draft_depends_on_its_sequence_alone(
    tiny: Bundled, long_ones: list[Request], undisturbed: Told, config: dict[str, float]
) -> None:
    """Chunks, company and recomputation change nothing; only a prefix hit may, and there is none here."""
    engine = tiny.engine(prefix_reuse=False, **config)
    told = run(engine, long_ones, listen(engine))
    assert told.tokens() == undisturbed.tokens()
    common = told.drafts.keys() & undisturbed.drafts.keys()
    assert len(common) > 0.8 * len(undisturbed.drafts)
    assert {key: told.drafts[key] for key in common} == {key: undisturbed.drafts[key] for key in common}
    assert (engine.scheduler.num_preemptions > 1) == ("kv_gb" in config)


# ---- its memory ----------------------------------------------------------------------------------------------------


def mtp_rows(runner: Runner, table: list[int], stop: int) -> torch.Tensor:
    """The MTP layer's KV of positions 0 .. stop - 1."""
    blocks = runner.kv[-1].view(-1, 64, runner.kv.shape[2])
    return blocks[table].flatten(0, 1)[:stop].clone()


def plain_rows(tiny: Bundled, tokens: list[int], prompt_len: int) -> torch.Tensor:
    """The same from the definition: the whole prompt at once, then a row at a time."""
    runner = Runner(tiny.model, num_blocks=-(-len(tokens) // 64), mtp=True)
    table = list(range(-(-len(tokens) // 64)))
    hidden = [runner.hidden([Work(tokens[:prompt_len], 0, table, False)])]
    hidden += [runner.hidden([Work(tokens[i : i + 1], i, table, True)]) for i in range(prompt_len, len(tokens) - 1)]
    before = torch.cat(hidden)
    if prompt_len > 1:
        runner.mtp_hidden([Work(tokens[1:prompt_len], 1, table, False)], before[: prompt_len - 1])
    for i in range(prompt_len, len(tokens)):
        runner.mtp_hidden([Work(tokens[i : i + 1], i, table, True)], before[i - 1 : i])
    return mtp_rows(runner, table, len(tokens))


def step_until(engine: Engine, request_id: str, num_generated: int) -> Seq:
    """The sequence when it has that many tokens, or one more."""
    while True:
        engine.step()
        engine.draft()
        for seq in engine.scheduler.decode.running:
            if seq.request.id == request_id and seq.num_generated >= num_generated:
                return seq


@pytest.mark.parametrize(
    ("prompt_len", "step_tokens"),
    [(1, 66), (2, 66), (60, 66), (63, 66), (64, 66), (65, 66), (120, 66), (128, 66), (128, 130), (131, 66), (131, 300)],
)
def test_slots_hold_what_their_definition_says(tiny: Bundled, prompt_len: int, step_tokens: int) -> None:
    """Also at the edges of blocks and chunks, where a hidden state waits for the next step."""
    ids = ask(tiny, 0, repeat=80).prompt_ids[:prompt_len]
    assert len(ids) == prompt_len
    params = SamplingParams(temperature=0.7, max_tokens=80, ignore_eos=True)
    engine = tiny.engine(max_running=1, step_tokens=step_tokens, kv_gb=6 * BLOCK_GB)
    engine.executor.runner.kv.fill_(float("nan"))
    engine.add(Request(id="a", prompt_ids=ids, params=params, seed=3))
    seq = step_until(engine, "a", 12)
    num_slots = min(len(seq.tokens), 64 * len(seq.table))
    ours = mtp_rows(engine.executor.runner, seq.table, num_slots)
    expected = plain_rows(tiny, seq.tokens, prompt_len)[:num_slots]
    assert torch.equal(ours[1:], expected[1:])


def test_after_a_prefix_hit_one_slot_is_empty_and_the_rest_is_there(tiny: Bundled) -> None:
    ids = ask(tiny, 2, repeat=80).prompt_ids[:150]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = tiny.engine(max_running=2, kv_gb=8 * BLOCK_GB)
    engine.executor.runner.kv.fill_(float("nan"))
    first = run(engine, [Request(id="a", prompt_ids=ids, params=params, seed=3)])
    accepted = engine.scheduler.num_accepted
    engine.add(Request(id="b", prompt_ids=ids, params=params, seed=3))
    seq = step_until(engine, "b", 20)
    assert seq.num_cached == 128
    ours, expected = mtp_rows(engine.executor.runner, seq.table, 150), plain_rows(tiny, seq.tokens, 150)
    assert torch.equal(ours[1:128], expected[1:128]), "found in the cache"
    assert not ours[128].any(), "nobody has the hidden state before it"
    assert not ours[129:].isnan().any()
    run(engine, [])
    assert seq.tokens[150:] == first.tokens()["a", 0]
    assert engine.scheduler.num_accepted - accepted > 0.6 * accepted, "a hole costs a little acceptance, not more"


def test_what_a_request_of_one_token_leaves_behind_is_complete(tiny: Bundled) -> None:
    """It ends before anybody drafts; the blocks of its prompt must serve the next one's drafts all the same."""
    ids = ask(tiny, 4, repeat=80).prompt_ids[:130]
    engine = tiny.engine(max_running=2, kv_gb=8 * BLOCK_GB)
    engine.executor.runner.kv.fill_(float("nan"))
    run(engine, [Request(id="a", prompt_ids=ids, params=SamplingParams(max_tokens=1), seed=3)])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(Request(id="b", prompt_ids=ids, params=params, seed=3))
    seq = step_until(engine, "b", 2)
    assert seq.num_cached == 128
    expected = plain_rows(tiny, seq.tokens, 130)
    assert torch.equal(mtp_rows(engine.executor.runner, seq.table, 128)[1:], expected[1:128])


def test_memory_counts_the_layer(tiny: Bundled) -> None:
    engines = [tiny.engine(kv_gb=20.5 * BLOCK_GB, mtp=mtp) for mtp in (True, False)]
    assert [engine.scheduler.pool.num_blocks for engine in engines] == [20, 23]
    assert all(engine.kv_bytes <= 20.5 * BLOCK_GB * 2**30 for engine in engines)
