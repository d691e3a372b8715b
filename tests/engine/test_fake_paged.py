"""The fake engine gives the tokens of one without memory, and notices wrong KV."""

from __future__ import annotations

from bench.instant_engine import InstantEngine
from tripool.core import Request, SamplingParams, TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.engine_protocol import StepEngine

TEXT = fake_text()


def requests() -> list[Request]:
    options: list[dict[str, object]] = [
        {}, {"n": 3, "max_tokens": 20}, {"ignore_eos": True, "max_tokens": 90}, {"min_tokens": 30},
        {"logprobs": 2}, {"structure": {"regex": "[a-c]{3,9}"}, "n": 2}, {"stop_token_ids": (5, 300)},
    ]  # fmt: skip
    return [
        Request(
            id=str(i),
            prompt_ids=tuple(range(4, 40 + 30 * i)),
            params=SamplingParams.from_options(each),
            seed=i,
            end_ids=TEXT.end_ids,
        )
        for i, each in enumerate(options)
    ]


def run(engine: StepEngine) -> dict[tuple[str, int], list[TokenEvent]]:
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    for request in requests():
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            events.setdefault((event.request_id, event.choice), []).append(event)
    return events


def test_the_same_tokens_also_when_memory_is_short() -> None:
    plain = {key: [e.token_id for e in each] for key, each in run(InstantEngine(TEXT)).items()}
    for num_blocks in (256, 9):
        engine = PagedFake(TEXT, num_blocks=num_blocks)
        assert {key: [e.token_id for e in each] for key, each in run(engine).items()} == plain
        engine.scheduler.check()
        assert engine.num_held_blocks == 0


def test_wrong_bytes_change_the_answer() -> None:
    def answer(spoil: bool) -> list[int]:
        engine, tokens = PagedFake(TEXT), list[int]()
        engine.add(requests()[2])
        while engine.busy:
            tokens += [event.token_id for event in engine.step()]
            if spoil and len(tokens) == 5:
                block = engine.scheduler.decode.running[0].table[-1]
                engine.import_block(block, memoryview(bytes(engine.block_bytes)))
        return tokens

    assert answer(spoil=False)[:5] == answer(spoil=True)[:5]
    assert answer(spoil=False) != answer(spoil=True)
