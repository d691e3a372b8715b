"""Published ablations: right in sign and size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tripool.planner.cost import DecodeModel, PrefillModel, Setup
from tripool.planner.hardware import named_hardware
from tripool.planner.models import named_model

R1 = named_model("deepseek-r1")
CHIP, H100 = named_hardware("ascend-910c"), named_hardware("h100")
CONTEXT = 4096 + 128


def decode(batch: int, *, drafts: int = 1, microbatches: int | None = None) -> float:
    """Tokens per second and chip on EP320, at a batch per chip; the better of one and two microbatches unless told."""

    def rate(count: int) -> float:
        setup = Setup(ep=320, precision="int8", drafts=drafts, accept=0.7 * drafts, microbatches=count)
        return DecodeModel(CHIP, R1, setup).tokens_per_s_per_chip(batch / 2, CONTEXT)

    return max(rate(1), rate(2)) if microbatches is None else rate(microbatches)


def gain(batch: int) -> float:
    return decode(batch, microbatches=2) / decode(batch, microbatches=1) - 1


def test_microbatches_in_decode_on_the_fast_plane() -> None:
    """Published: +5.8, +9.4 and +6.9 % at batch 64, 96 and 128."""
    gains = [gain(batch) for batch in (64, 96, 128)]
    assert gains == pytest.approx([0.058, 0.094, 0.069], abs=0.035)
    assert sum(gains) / 3 == pytest.approx(0.074, abs=0.02)


def test_microbatches_cost_at_small_batches() -> None:
    assert gain(8) < gain(16) < 0 and gain(24) < 0.005


def test_microbatches_in_decode_over_rdma() -> None:
    """Published: up to about +35 % on 72 H100 at 256 requests; nothing, or worse, at small ones."""

    def rate(batch: int, microbatches: int) -> float:
        setup = Setup(ep=72, precision="fp8", microbatches=microbatches)
        return DecodeModel(H100, R1, setup).tokens_per_s_per_chip(batch, 2050)

    assert rate(256, 2) / rate(256, 1) - 1 == pytest.approx(0.35, abs=0.07)
    assert rate(8, 2) < rate(8, 1)


@pytest.mark.parametrize(
    ("hardware", "precision", "low", "high"), [(CHIP, "int8", 0.20, 0.34), (H100, "fp8", 0.25, 0.42)]
)
def test_microbatches_in_prefill(hardware, precision, low, high) -> None:
    """Published: +23 to 31 % on CloudMatrix384, +27 to 35 % on H100, by prompt length."""
    for prompt in (1024, 4096, 8192):
        one, two = (
            PrefillModel(hardware, R1, Setup(ep=32, precision=precision, microbatches=count)).tokens_per_s_per_chip(
                16384 / hardware.ranks, prompt
            )
            for count in (1, 2)
        )
        assert low <= two / one - 1 <= high


def test_drafts_gain_less_with_the_batch() -> None:
    """Published: from about +49 % down to about +6 %."""
    gains = [decode(batch) / decode(batch, drafts=0) - 1 for batch in (8, 16, 32, 64, 96)]
    assert all(left > right for left, right in pairwise(gains))
    assert gains[0] == pytest.approx(0.49, abs=0.06) and gains[-1] == pytest.approx(0.06, abs=0.03)


def test_a_layer_with_and_without_drafts() -> None:
    """Published: 874 and 1,260 microseconds per layer at batch 96."""

    def layer_us(drafts: int) -> float:
        setup = Setup(ep=320, precision="int8", drafts=drafts, accept=0.7 * drafts, microbatches=2)
        step = DecodeModel(CHIP, R1, setup).step(48, CONTEXT)
        outside = sum(seconds for name, seconds in step.parts if name in ("head", "step"))
        return (step.seconds - outside) / (61 + drafts) * 1e6

    assert layer_us(0) == pytest.approx(874, rel=0.10)
    assert layer_us(1) == pytest.approx(1260, rel=0.05)


def reused(share: float, plane: str = "memory") -> tuple[float, float]:
    """Prefill throughput over that without reuse, and the time of a batch over that without; four prompts a chip."""
    model = PrefillModel(CHIP, R1, Setup(ep=32, precision="int8", microbatches=2))
    tokens = 8192 * (1 - share)
    rate = model.tokens_per_s_per_chip(tokens, 4096, 4096 * share, plane=plane) / model.tokens_per_s_per_chip(
        8192, 4096
    )
    return rate, model.step_s(tokens, 4096, 4096 * share, plane=plane) / model.step_s(8192, 4096)


def test_a_context_cache_multiplies_prefill() -> None:
    """Published: x 1.42 at 50 % reuse and x 2.28 at 90 %; first tokens 34 and 59 % sooner."""
    half, most = reused(0.5), reused(0.9)
    assert half[0] == pytest.approx(1.42, rel=0.07) and most[0] == pytest.approx(2.28, rel=0.07)
    assert 1 - half[1] == pytest.approx(0.34, abs=0.07) and 1 - most[1] == pytest.approx(0.59, abs=0.07)


def test_the_memory_plane_serves_the_cache_faster() -> None:
    """Published: up to x 1.52 over the VPC plane."""
    ratios = [reused(share)[0] / reused(share, "service")[0] for share in (0.125, 0.5, 0.9)]
    assert ratios == sorted(ratios) and ratios[-1] == pytest.approx(1.52, rel=0.07)


def test_balancing_pays() -> None:
    """Published for H100: balancing is worth x 1.49 in prefill and x 2.54 in decode; here at least a tenth."""

    def rate(balance) -> float:
        setup = Setup(ep=72, precision="fp8", microbatches=2, balance=balance)
        return DecodeModel(H100, R1, setup).tokens_per_s_per_chip(256, 2050)

    assert 1.1 * rate("none") < rate("balanced") < rate("perfect")
