from __future__ import annotations

import json
import math

import pytest
import torch

from oracle.cases import CASES
from oracle.reference import Reference
from tripool.checkpoints import open_checkpoint
from tripool.cli.main import main
from tripool.quant import QuantizeError, Side, compare, read_windows
from tripool.text import Tokenizer

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.prove
def test_perplexity_and_agreement_are_those_of_transformers(made_of) -> None:
    """An oracle nobody here wrote: the loss of transformers' own network, and the KL from both sides' logits."""
    made = made_of(BY_NAME["llama-wide-heads"])
    reference = Reference.load(made.source)
    with open_checkpoint(made.source) as a, open_checkpoint(made.target) as b:
        one, other = Side(a, "float32", window=130, num_answers=2), Side(b, "float32", window=130, num_answers=2)
    found = compare(one, other, made.windows, num_answers=2, answer_tokens=6)
    loss, same, divergence, count = 0.0, 0, 0.0, 0
    for window in made.windows:
        theirs, ours = reference.logits(window)[:-1].log_softmax(-1), other.logits(window)[:-1].log_softmax(-1)
        loss += torch.nn.functional.nll_loss(theirs, torch.tensor(window[1:]), reduction="sum").item()
        same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        divergence += torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum").item()
        count += len(window) - 1
    assert found.num_tokens == count
    assert found.perplexity_a == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert found.next_token_agreement == pytest.approx(same / count, abs=2 / count)  # a tie may fall either way
    assert found.mean_kl == pytest.approx(divergence / count, rel=0.02, abs=1e-6)
    greedy = [one.tokens for one in reference.greedy([window[:32] for window in made.windows[:2]], 6)]
    assert one.greedy([window[:32] for window in made.windows[:2]], 6) == greedy


def test_only_what_comes_from_the_start_on_counts(made_of) -> None:
    """A window's first part is read and not scored: its places are those of the whole window, less the first ones."""
    made = made_of(BY_NAME["llama-wide-heads"])
    with open_checkpoint(made.source) as a, open_checkpoint(made.target) as b:
        one, other = Side(a, "float32", window=130, num_answers=1), Side(b, "float32", window=130, num_answers=1)
    starts = [1, 40, 129]
    found = compare(one, other, made.windows, starts=starts, num_answers=0)
    loss, divergence, count = 0.0, 0.0, 0
    for window, start in zip(made.windows, starts, strict=True):
        said, theirs = (side.logits(window).log_softmax(-1) for side in (one, other))
        for place in range(start, len(window)):
            loss -= float(said[place - 1, window[place]])
            divergence += float((said[place - 1].exp() * (said[place - 1] - theirs[place - 1])).sum())
            count += 1
    assert found.num_tokens == count == 129 + 90 + 1
    assert found.perplexity_a == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert found.mean_kl == pytest.approx(divergence / count, rel=1e-3, abs=1e-7)


def test_greedy_agreement_ends_at_the_first_difference(made_of, monkeypatch) -> None:
    made = made_of(BY_NAME["llama-wide-heads"])
    with open_checkpoint(made.source) as a:
        one, other = (Side(a, "float32", window=130, num_answers=2) for _ in range(2))
    written = {id(one): [[1, 2, 3, 4], [5, 6, 7, 8]], id(other): [[1, 2, 9, 4], [5, 6, 7, 8]]}
    monkeypatch.setattr(Side, "greedy", lambda self, prompts, count: written[id(self)])
    found = compare(one, other, made.windows[:2], answer_tokens=4)
    assert (found.greedy_agreement, found.num_greedy_tokens) == (6 / 8, 8)


def test_the_verbs_quantise_and_compare(folder_of, tmp_path, capsys) -> None:
    source, text = folder_of(BY_NAME["llama-3"]), tmp_path / "text.txt"
    text.write_text("The fox and the river. " * 60)
    target, numbers = tmp_path / "int8", tmp_path / "numbers.json"
    for command in (
        ["quantize", str(source), str(target), "--calibration", str(text), "--tokens", "200", "--threads", "1"],
        ["eval", str(source), str(target), "--text", str(text), "--window", "64", "--answers", "2",
         "--answer-tokens", "4", "--precision-b", "w8a8", "--json", str(numbers), "--threads", "1"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code
    said = capsys.readouterr()
    assert "self_attn.q_proj" in said.out
    assert "next-token agreement" in said.out
    assert "4 of 4: model.layers.2" in said.err
    found = json.loads(numbers.read_text())
    assert found["next_token_agreement"] > 0.9
    assert abs(found["perplexity_change"]) < 0.05
    assert 0 < found["mean_kl"] < 0.05
    assert found["num_greedy_tokens"] == 8


def test_text_that_gives_no_window_is_refused(folder_of, tmp_path) -> None:
    with open_checkpoint(folder_of(BY_NAME["llama-3"])) as checkpoint:
        tokenizer = Tokenizer(checkpoint.text)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(QuantizeError, match="tokens"):
        read_windows(empty, tokenizer, num_tokens=100, window=50)
    with pytest.raises(QuantizeError, match="cannot read"):
        read_windows(tmp_path / "none.txt", tokenizer, num_tokens=100, window=50)
    windows = read_windows(None, tokenizer, num_tokens=500, window=200)
    assert [len(window) for window in windows] == [200, 200]
