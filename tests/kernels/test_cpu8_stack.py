"""Whole steps in one call: the same to the bit as half after half, and as the sampler's own choices."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tripool.engine.noise import draw, token_hashes
from tripool.kernels import CPU8, Batch
from tripool.kernels.cpu8.library import set_threads
from tripool.kernels.ref.mla import MlaWeights
from tripool.kernels.ref.route import RoutePlan
from tripool.kernels.sequence_rows import SequenceRows
from tripool.kernels.table import DraftParts, StackParts
from tripool.kernels.weights import GqaWeights, JoinWeights, LatentWeights, MlpWeights, MoeWeights, Norm
from tripool.sequence import Work

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS, ROPE, CONTEXT = 72, 203, 96, 3, 8, 256


def norm(width: int = HIDDEN) -> Norm:
    return Norm(1 + 0.1 * torch.randn(width), 1e-5)


def mla() -> LatentWeights:
    heads, rank, nope, v, q_rank = 5, 48, 16, 12, 36
    core = MlaWeights(
        query=torch.randn(heads * (nope + ROPE), q_rank) * 0.2,
        up=torch.randn(heads, nope + v, rank) * 0.2,
        out=torch.randn(HIDDEN, heads * v) * 0.2,
        out_bias=None,
        nope=nope,
        scale=0.2,
    )
    down = torch.randn(q_rank + rank + ROPE, HIDDEN) * 0.3
    return LatentWeights(norm=norm(), down=down, down_bias=None, q_norm=norm(q_rank), kv_norm=norm(rank), core=core)


def gqa() -> GqaWeights:
    heads, kv_heads = 6, 2
    return GqaWeights(
        norm=norm(),
        qkv=torch.randn((heads + 2 * kv_heads) * ROPE, HIDDEN) * 0.3,
        qkv_bias=None,
        out=torch.randn(HIDDEN, heads * ROPE) * 0.2,
        out_bias=None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=ROPE,
        scale=0.3,
        q_norm=None,
        k_norm=None,
    )


def dense(width: int = 100) -> MlpWeights:
    return MlpWeights(
        norm=norm(),
        gate_up=torch.randn(2 * width, HIDDEN) * 0.2,
        gate_up_bias=None,
        down=torch.randn(HIDDEN, width) * 0.2,
        down_bias=None,
    )


def experts(count: int = 8, width: int = 40) -> MoeWeights:
    plan = RoutePlan(top_k=3, score="sigmoid", groups=1, top_groups=1, group_top=1, normalise=True, scaling=1.5)
    return MoeWeights(
        norm=norm(),
        gate=torch.randn(count, HIDDEN),
        gate_bias=torch.randn(count),
        gate_up=torch.randn(count, 2 * width, HIDDEN) * 0.2,
        down=torch.randn(count, HIDDEN, width) * 0.2,
        shared=dense(33),
        plan=plan,
    )


class Network:
    """A small one of either kind of attention, its draft layer, and the plain way through them."""

    def __init__(self, latent: bool) -> None:
        def layer():
            attention = CPU8.mla(mla()) if latent else CPU8.gqa(gqa())
            return attention, CPU8.moe(experts()) if latent else CPU8.mlp(dense())

        angles = torch.arange(CONTEXT)[:, None] * torch.linspace(0.01, 1.0, ROPE // 2)
        embed, cos_sin = torch.randn(VOCAB, HIDDEN), torch.polar(torch.ones_like(angles), angles)
        head = CPU8.linear(torch.randn(VOCAB, HIDDEN), None)
        self.parts = StackParts(
            embed=embed, cos_sin=cos_sin, layers=[layer() for _ in range(LAYERS)], norm=norm(), head=head
        )
        assert CPU8.stack is not None
        self.stack = CPU8.stack(self.parts)
        join = CPU8.join(JoinWeights(left=norm(), right=norm(), weight=torch.randn(HIDDEN, 2 * HIDDEN) * 0.2))
        attention, mlp = layer()
        first = head.first(DRAFT_VOCAB)
        self.draft = CPU8.draft(
            DraftParts(embed=embed, cos_sin=cos_sin, join=join, attention=attention, mlp=mlp, norm=norm(), head=first)
        )
        self.kv_width = 56 if latent else 4 * ROPE

    def kv(self) -> torch.Tensor:
        return torch.full((LAYERS + 1, 8 * 64, self.kv_width), float("nan"))

    def plain(self, pieces: list[Work], kv: torch.Tensor) -> torch.Tensor:
        batch, x = batch_of(pieces, 0), self.parts.embed[[t for piece in pieces for t in piece.tokens]]
        batch.cos_sin = self.parts.cos_sin[batch.positions]
        for (attention, mlp), layer_kv in zip(self.parts.layers, kv.unbind(0), strict=False):
            attention(x, batch, layer_kv)
            mlp(x)
        return CPU8.rms_norm(x, self.parts.norm.gain, self.parts.norm.eps)


def batch_of(pieces: list[Work], first: int) -> Batch:
    prompts: list[SequenceRows] = []
    decodes: list[SequenceRows] = []
    for piece in pieces:
        seqs = decodes if piece.decode else prompts
        row = seqs[-1].row + seqs[-1].count if seqs else 0
        seqs.append(SequenceRows(row, len(piece.tokens), piece.start, piece.table, first))
    tokens = torch.tensor([token for piece in pieces for token in piece.tokens])
    places = [(piece.table, p) for piece in pieces for p in range(piece.start, piece.stop)]
    slots = torch.tensor([table[p // 64] * 64 + p % 64 for table, p in places])
    rows = sum(seq.count for seq in prompts)
    return Batch(tokens, torch.tensor([p for _, p in places]), slots, rows, prompts, decodes)


def chosen_from(logits: torch.Tensor, draws: list[tuple[float, int]]) -> list[int]:
    hashes = token_hashes(VOCAB)
    return [
        draw(row, heat, key, hashes) if heat else int(row.argmax())
        for row, (heat, key) in zip(logits, draws, strict=True)
    ]


@pytest.fixture(params=[1, 2])
def _threads(request):
    torch.manual_seed(5)
    set_threads(request.param)
    yield
    set_threads(1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("latent", [True, False], ids=["mla", "gqa"])
def test_a_step_is_half_after_half(latent: bool) -> None:
    network, random = Network(latent), Random(3)
    kv, plain_kv = network.kv(), network.kv()

    def tokens(count: int) -> list[int]:
        return [random.randrange(VOCAB) for _ in range(count)]

    steps = [
        [Work(tokens(70), 0, [3, 1], False), Work(tokens(5), 0, [0], False)],
        [Work(tokens(9), 70, [3, 1], False), Work(tokens(1), 5, [0], True), Work(tokens(3), 0, [5], False)],
        [Work(tokens(1), 79, [3, 1], True), Work(tokens(2), 6, [0], True), Work(tokens(4), 3, [5], False)],
        [Work(tokens(2), 80, [3, 1], True)],
    ]
    for work in steps:
        pieces = sorted(work, key=lambda piece: piece.decode)
        rows = sum(len(piece.tokens) for piece in pieces)
        wanted = random.sample(range(rows), min(rows, 3))
        draws = [(random.choice((0.0, 0.7)), random.getrandbits(64)) for _ in wanted]
        hidden, chosen = network.stack.step(pieces, kv, wanted, draws)
        plain = network.plain(pieces, plain_kv)
        assert torch.equal(hidden, plain)
        assert torch.equal(kv.nan_to_num(7.0), plain_kv.nan_to_num(7.0))
        assert chosen == chosen_from(network.parts.head(plain[wanted]), draws)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("latent", [True, False], ids=["mla", "gqa"])
def test_a_step_with_its_draft_is_one_after_the_other(latent: bool, heat: float) -> None:
    """One token, then one with a wrong draft, then one with a right one: each as the separate calls do it."""
    network, random = Network(latent), Random(11)
    kv, plain_kv, table = network.kv(), network.kv(), [6, 2, 4]
    prompt = Work([random.randrange(VOCAB) for _ in range(63)], 0, table, False)
    for memory in (kv, plain_kv):
        network.stack.step([prompt], memory, (), ())
        memory[LAYERS, : 8 * 64] = 0.1  # as if drafts had been made all along
    newest, start = 17, 63
    for kind in ("none", "wrong", "right", "right"):
        draws = [(heat, random.getrandbits(64)) for _ in range(3)]
        following = network.plain([Work([newest], start, table, True)], plain_kv)
        (true,) = chosen_from(network.parts.head(following), draws[:1])
        draft = {"none": [], "wrong": [(true + 1) % VOCAB], "right": [true]}[kind]
        work = Work([newest, *draft], start, table, True)
        tokens, guess = network.stack.step_and_guess(work, kv, draws, network.draft)

        hidden = network.plain([work], plain_kv)
        assert tokens == chosen_from(network.parts.head(hidden), draws[: len(work.tokens)])
        count = 2 if kind == "right" else 1
        batch = batch_of([Work(tokens[:count], start + 1, table, True)], 1)
        logits = network.draft.logits(batch, hidden[:count], plain_kv[LAYERS], [count - 1])
        assert [guess] == chosen_from(logits, draws[count : count + 1])
        assert torch.equal(kv.nan_to_num(7.0), plain_kv.nan_to_num(7.0))
        newest, start = tokens[count - 1], start + count


def test_drafts_are_chosen_from_their_logits() -> None:
    torch.manual_seed(5)
    network, random = Network(True), Random(2)
    kv, plain_kv = network.kv(), network.kv()
    pieces = [Work([5, 6, 7], 1, [0], False), Work([8], 3, [1], True), Work([9, 10], 4, [2], True)]
    for memory in (kv, plain_kv):
        memory[LAYERS] = 0.1
    hidden, rows = torch.randn(6, HIDDEN), [2, 3, 5]
    draws = [(0.9 * (i % 2), random.getrandbits(64)) for i in range(3)]
    chosen = network.draft.choose(pieces, hidden, kv[LAYERS], rows, draws)
    assert chosen == chosen_from(network.draft.logits(batch_of(pieces, 1), hidden, plain_kv[LAYERS], rows), draws)
    assert torch.equal(kv.nan_to_num(7.0), plain_kv.nan_to_num(7.0))
