"""What a grammar costs the engine: nothing per choice before it runs, and one mask per token while it does."""

from __future__ import annotations

import pytest

from grammar.counted import count_matchers
from tripool.core import Request, SamplingParams, Structure
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake
from tripool.errors import InvalidRequest

TEXT = fake_text()
LETTERS = Structure("regex", "[a-z ]{200}")


def request(id: str, *, structure: Structure = LETTERS, **options: object) -> Request:
    params = SamplingParams.from_options({"structure": structure, "max_tokens": 20} | options)
    return Request(id=id, prompt_ids=(9, 9), params=params, seed=1, end_ids=TEXT.end_ids)


def test_choices_that_wait_have_no_copy_of_the_grammar(monkeypatch):
    counts = count_matchers(monkeypatch)
    engine = PagedFake(TEXT, max_running=8)
    for number in range(8):
        engine.add(request(str(number), n=128))
    assert counts == {"compile": 1, "deep_copy": 1, "compute_bitmask": 1}, "one look for all of them"
    engine.step()
    for _ in range(6):
        counts.clear()
        engine.step()
        assert counts["deep_copy"] <= 8 and counts["compute_bitmask"] <= 8


@pytest.mark.parametrize("how", ["begun", "adopted"])
def test_an_answer_that_is_replayed_pays_no_mask_for_what_is_known(monkeypatch, how: str):
    source, engine = PagedFake(TEXT), PagedFake(TEXT)
    source.add(request("r", max_tokens=100))
    known = [event.token_id for _ in range(60) for event in source.step()]
    counts = count_matchers(monkeypatch)
    if how == "begun":
        engine.add(request("r", max_tokens=100), {0: known})
    else:
        seq = engine.attach(request("r", max_tokens=100), 0, known, 2 + len(known) - 1)
        assert seq is not None
        for ours, theirs in zip(seq.table, source.scheduler.decode.running[0].table, strict=False):
            engine.import_block(ours, source._kv[theirs * source.block_bytes : (theirs + 1) * source.block_bytes])
        engine.start(seq)
    assert counts == {"compile": 1, "deep_copy": 1, "compute_bitmask": 1}
    counts.clear()
    while not engine.step():
        pass
    assert counts == {"deep_copy": 1, "compute_bitmask": 2, "consume_token": len(known) + 1}


def test_a_replayed_answer_goes_on_as_it_would_have():
    whole, engine = PagedFake(TEXT), PagedFake(TEXT)
    whole.add(request("r", max_tokens=40))
    tokens = [event.token_id for _ in range(40) for event in whole.step()]
    engine.add(request("r", max_tokens=40), {0: tokens[:25]})
    rest = []
    while engine.busy:
        rest += [event.token_id for event in engine.step()]
    assert rest == tokens[25:]


def test_what_was_prepared_is_not_compiled_in_the_engine(monkeypatch):
    engine = PagedFake(TEXT)
    counts = count_matchers(monkeypatch)
    futures = [engine.prepare(request(f"r{i}", structure=Structure("choice", [f"{i}"]))) for i in range(40)]
    for future in futures:
        assert future is not None
        future.result(60)
    counts.clear()
    for i in range(40):
        engine.add(request(f"r{i}", structure=Structure("choice", [f"{i}"])))
    assert counts["compile"] == 0
    plain = Request(id="plain", prompt_ids=(9,), params=SamplingParams(), seed=1)
    assert engine.prepare(plain) is None


def test_what_leaves_nothing_to_generate_is_refused_when_it_is_added():
    engine = PagedFake(TEXT)
    with pytest.raises(InvalidRequest, match="leaves nothing") as caught:
        engine.add(request("r", structure=Structure("ebnf", "start: start")))
    assert caught.value.hint == "no text can satisfy it"
    assert not engine.busy
