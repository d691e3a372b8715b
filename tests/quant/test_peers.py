"""Others read what we write: transformers with compressed-tensors, in the peers' own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from oracle.case import make_case, rope
from tripool.checkpoints import open_checkpoint
from tripool.quant import Side

REPO = Path(__file__).parents[2]
PEERS_PYTHON = REPO / ".venv-peers" / "bin" / "python"
TIE_GAP = 0.1
"""Two leading logits closer than this may change places: the order of a sum decides which way a half is rounded, and
one half is enough to move this network's logits by 0.05 as a rule and by 0.2 at most (of 390 places; their standard
deviation is 1.9). Where no half falls the other way the two differ by 3e-6."""

CASE = make_case(
    "llama-peer",
    "llama",
    {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    rope=rope(),
    width=160,
    layers=3,
    vocab=257,
)


@pytest.mark.prove
@pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="no peers here (run: make peers)")
def test_transformers_with_compressed_tensors_writes_our_greedy_text(made_of) -> None:
    made = made_of(CASE)
    assert made.result.kept, "some parts stayed in floats, so that the ignore list is read as well"
    prompts, count = [window[:24] for window in made.windows], 24
    program = Path(__file__).with_name("peer_reads.py")
    command = [str(PEERS_PYTHON), str(program), str(made.target), json.dumps(prompts), str(count)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    with open_checkpoint(made.target) as checkpoint:
        ours = Side(checkpoint, "w8a8", window=64, num_answers=len(prompts)).greedy(prompts, count)
    integers = sum(not one["kept"] for one in made.result.linears)
    assert theirs["schemes"] == integers, "every linear that we rounded, and no other"
    equal = 0
    for answer, expected, gaps in zip(ours, theirs["answers"], theirs["gaps"], strict=True):
        first = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), count)
        assert first == count or gaps[first] < TIE_GAP, (answer, expected, gaps)
        equal += first
    assert equal >= 0.8 * count * len(prompts)
