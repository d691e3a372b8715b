"""The draft layer's own lesson: what it is judged by, what it is asked, and that nothing but it changes."""

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny.distil.prompts import make_script
from tiny.drafts import learn as learning
from tiny.drafts import speaker as speakers
from tiny.drafts.__main__ import main
from tiny.drafts.learn import Amount, learn_drafts
from tiny.drafts.lesson import Lesson
from tiny.drafts.loss import TEMPERATURE, Found, acceptance, compare
from tiny.drafts.questions import questions
from tiny.drafts.speaker import Speaker
from train.small import small_config, small_network
from tripool.checkpoints import open_checkpoint
from tripool.engine.device import DeviceSpec
from tripool.engine.noise import gumbel, token_hashes
from tripool.train.attention import MASKED, document_starts
from tripool.train.config import TrainError
from tripool.train.device import _sizes
from tripool.train.encode import ANSWER, PROMPT, SKIPPED, Encoded
from tripool.train.export import export
from tripool.train.metrics import read_metrics
from tripool.train.network import Network
from tripool.train.plan import Optimise
from tripool.train.rows import pack

pytestmark = pytest.mark.prove  # only `make tiny` runs this code

AMOUNT = Amount(answers=8, steps=24)
WORDS = slice(40, 100)
ANSWER_TOKENS = 48


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows that are filled by few of them: full ones take a GPU a moment and a CPU a minute."""
    monkeypatch.setattr(speakers, "ANSWER_TOKENS", ANSWER_TOKENS)
    monkeypatch.setattr(learning, "ROW_TOKENS", 160)


def test_acceptance_is_how_often_the_same_noise_chooses_the_same() -> None:
    rng = torch.Generator().manual_seed(4)
    network = 2 * torch.randn(3, 40, generator=rng)
    draft = network + 1.5 * torch.randn(3, 40, generator=rng)
    hashes, same, num_draws = token_hashes(40), torch.zeros(3), 4000
    for key in range(num_draws):
        noise = gumbel(key * 7919, hashes)
        chosen = [(one / TEMPERATURE + noise).argmax(-1) for one in (network, draft)]
        same += chosen[0] == chosen[1]
    seen, told = same / num_draws, acceptance(network, draft)
    assert bool((told > 0.05).all()) and bool((told < 0.95).all())
    # Four standard errors, and what the tokens beyond the likeliest would add.
    assert bool(((seen - told).abs() < 4 * 0.5 / num_draws**0.5 + 0.02).all())


def test_a_draft_that_says_the_same_is_perfect() -> None:
    logits = 9 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    scores = compare(logits, logits + 3.0).scores()
    assert scores.divergence == pytest.approx(0, abs=1e-5)
    assert scores.acceptance == pytest.approx(1, abs=1e-3)
    assert scores.agreement == 1


def test_questions_are_the_seeds_some_strange_and_some_of_the_corpus() -> None:
    some = list(islice(questions(3), 600))
    assert some == list(islice(questions(3), 600))
    assert some != list(islice(questions(4), 600))
    assert all(one[-1]["role"] == "user" and one[-1]["content"] for one in some)
    corpus = {script.turns[0].user for script in (make_script(3, number) for number in range(4000))}
    first = [next(message for message in one if message["role"] == "user")["content"] for one in some]
    of_corpus = sum(content in corpus for content in first) / len(first)
    assert 0.35 < of_corpus < 0.75, "words exchanged in some, others as they are"
    assert any(len(one) > 2 and one[-2]["role"] == "assistant" for one in some), "a second turn"
    assert any("story" in content for content in first) and any("JSON" in content for content in first)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that know few words and are sure of them, with the bundled model's text."""
    folder, config = tmp_path_factory.mktemp("student"), small_config()
    network = small_network(config)
    with open_checkpoint("tiny") as checkpoint, torch.no_grad():
        network.head[WORDS] *= 2
        network.head[: WORDS.start] = network.head[WORDS.stop :] = 0
        export(network, config.model, checkpoint.text, folder)
    return folder


def test_an_answer_stops_where_the_model_ends_it() -> None:
    with open_checkpoint("tiny") as checkpoint:
        ends = checkpoint.text.end_ids
    speaker = Speaker(DeviceSpec(torch.device("cpu"), torch.float32), "tiny", rows=4, seed=1)
    first, second = speaker.answers(questions(1)), speaker.answers(questions(1))
    for one in first:
        prompt, answer = one.tokens[one.kinds != ANSWER], one.tokens[one.kinds == ANSWER]
        assert one.kinds[0] == SKIPPED and bool((one.kinds[1 : len(prompt)] == PROMPT).all())
        assert bool((one.kinds[len(prompt) :] == ANSWER).all())
        assert not ends & set(answer[:-1].tolist())
        assert answer[-1] in ends or len(answer) == ANSWER_TOKENS
    assert any(one.tokens[-1] in ends for one in first)
    pairs = list(zip(first, second, strict=True))
    assert all(np.array_equal(a.tokens[a.kinds != ANSWER], b.tokens[b.kinds != ANSWER]) for a, b in pairs)
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in pairs), "the same questions, drawn anew"


def tensors(folder: Path) -> dict[str, str]:
    with open_checkpoint(str(folder)) as checkpoint:
        found = {}
        for name, info in checkpoint.infos().items():
            values = torch.empty(info.shape)
            checkpoint.read(name, values)
            found[name] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return found


def documents(count: int) -> list[Encoded]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        prompt, answer = rng.integers(3, 9), rng.integers(1, 14)
        kinds = np.array([SKIPPED] + [PROMPT] * (prompt - 1) + [ANSWER] * answer, dtype=np.uint8)
        found.append(Encoded(rng.integers(6, 900, prompt + answer).astype(np.int32), kinds))
    return found


def alone(network: Network, one: Encoded) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Place by place: what the network says after an answer's token, and what was foretold of it before that token."""
    row = pack([one], 64, pad=0)
    states = network(row.tokens.long(), MASKED.sight(row.documents), row.documents == 0)
    assert states.mtp is not None
    return [
        (network.logits(states.hidden[0, said]), network.logits(states.mtp[0, said - 1]))
        for said in range(1, len(one.tokens) - 1)
        if one.kinds[said] == ANSWER and one.kinds[said + 1] == ANSWER
    ]


def test_packed_rows_are_judged_as_each_document_alone(tmp_path: Path) -> None:
    some, network = documents(14), small_network(small_config(), row_tokens=64)
    rows = pack(some, 64, pad=0)
    assert len(rows) > 2 and int(rows.documents.max()) > 1
    with torch.no_grad():
        pairs = [pair for one in some for pair in alone(network, one)]
        expected = compare(*(torch.stack(side) for side in zip(*pairs, strict=True)))
        lesson = Lesson(network, MASKED, rows, Optimise(rows_per_step=2, rows_per_pass=2), tmp_path)
        found = lesson._pass(torch.arange(len(rows)))
    assert int(found.places) == len(pairs) > 30
    for mine, wanted in zip(found.scores().as_dict().values(), expected.scores().as_dict().values(), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-3)


def test_the_loss_falls_with_divergence_and_rises_with_drafts_that_fail() -> None:
    two, one, many = (torch.tensor(value) for value in (2.0, 1.0, 10.0))
    assert Found(one, one, one, many).loss() < Found(two, one, one, many).loss()
    assert Found(one, two, one, many).loss() < Found(one, one, one, many).loss()


def test_only_the_draft_layer_learns(student: Path, tmp_path: Path) -> None:
    told: list[str] = []
    before, after = learn_drafts(str(student), tmp_path, AMOUNT, seed=2, tell=told.append, clock=lambda: 0.0)
    assert after.divergence < 0.98 * before.divergence and after.acceptance > before.acceptance
    assert any("tokens/s" in line for line in told) and any("exported" in line for line in told)
    old, new = tensors(student), tensors(tmp_path / "model")
    changed = {name for name in old if old[name] != new[name]}
    assert old.keys() == new.keys() and "model.layers.2.eh_proj.weight" in changed
    assert all(name.startswith("model.layers.2.") for name in changed), "the layer after the last"
    with open_checkpoint(str(student)) as source, open_checkpoint(str(tmp_path / "model")) as result:
        assert source.text == result.text and dict(source.config) == dict(result.config)
        assert source.infos() == result.infos(), "in the types they had"
    assert len(read_metrics(tmp_path)) == AMOUNT.steps // 10
    with pytest.raises(TrainError, match="holds a model"):
        learn_drafts(str(student), tmp_path, AMOUNT)
    assert tensors(tmp_path / "model") == new


def test_a_layer_that_got_worse_is_not_kept(student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Found, "loss", lambda found: -found.divergence)
    told: list[str] = []
    before, after = learn_drafts(str(student), tmp_path, Amount(answers=4, steps=2), tell=told.append)
    assert after.divergence > before.divergence
    assert any("the old layer stays" in line for line in told)
    assert tensors(tmp_path / "model") == tensors(student)


def test_the_same_seed_gives_the_same_bytes(student: Path, tmp_path: Path) -> None:
    found: list[dict[str, str]] = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        learn_drafts(str(student), tmp_path / folder, Amount(answers=3, steps=2), seed=seed, tell=lambda line: None)
        found.append(tensors(tmp_path / folder / "model"))
    assert found[0] == found[1] != found[2]


def test_minutes_are_kept_by_the_clock(student: Path, tmp_path: Path) -> None:
    """Every look at the clock is six seconds later: speaking stops, learning stops, and the model is there."""
    now_s = iter(range(0, 10_000, 6))
    told: list[str] = []
    learn_drafts(str(student), tmp_path, Amount(minutes=1.5), tell=told.append, clock=lambda: float(next(now_s)))
    assert next(now_s) < 60 * 1.5 + 12
    assert (tmp_path / "model" / "config.json").exists()
    assert any(" left" in line for line in told)


@pytest.mark.parametrize(
    "options", [{"minutes": 0.0}, {"minutes": float("inf")}, {"minutes": float("nan")}, {"answers": 0}, {"steps": 0}]
)
def test_nothing_to_do_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(TrainError, match=next(iter(options))):
        Amount(**options)  # type: ignore[arg-type]


def test_a_model_in_integers_is_refused_with_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is quantised" in said and "before quantising" in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_used_is_refused_before_any_work(student: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot be made"):
        learn_drafts(str(student), tmp_path / "file", AMOUNT)
    with pytest.raises(TrainError, match="--seed"):
        learn_drafts(str(student), tmp_path / "out", AMOUNT, seed=2**40)
    for key, value, said in (
        ("num_nextn_predict_layers", 0, "no MTP layer"),
        ("max_position_embeddings", 128, "context of 128"),
        ("vocab_size", 4000, "its tokenizer 8192"),
    ):
        shutil.copytree(student, tmp_path / key)
        config = json.loads((student / "config.json").read_text())
        (tmp_path / key / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(TrainError, match=said):
            learn_drafts(str(tmp_path / key), tmp_path / "out", AMOUNT)
    assert not (tmp_path / "out").exists()


def test_questions_that_are_all_too_long_end_the_run() -> None:
    speaker = Speaker(DeviceSpec(torch.device("cpu"), torch.float32), "tiny", rows=2, seed=1)
    endless = repeat([{"role": "user", "content": "again and " * 200}])
    with pytest.raises(TrainError, match="too long"):
        speaker.answers(endless)


def test_a_pass_may_hold_a_row_twice() -> None:
    """Few rows, or the seam of two epochs: no document may be lost for want of a place in the list."""
    rows = pack(documents(9), 64, pad=0)
    most, longest = _sizes(rows, 6)
    twice = rows.documents[[0, 0, 1, 1, 0, 1]]
    starts = document_starts(twice, most)
    lengths = starts.diff()
    assert int(starts[-1]) == twice.numel() and int(lengths.max()) <= longest
