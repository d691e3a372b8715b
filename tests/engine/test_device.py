"""The engine over a device's runner and sampler, with the CPU for a device: the same text."""

from __future__ import annotations

import pytest
import torch

from tripool.checkpoints import open_checkpoint
from tripool.config import EngineConfig, Precision
from tripool.core import Request, SamplingParams
from tripool.engine.device import DeviceMissing, DeviceSpec, cuda_spec, load_on, table_of
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.errors import InvalidRequest, NotExact

PARAMS = (
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=17, temperature=0.9),
    SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, repetition_penalty=1.2),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
)


def answers(engine: Engine) -> list[list[int]]:
    """Requests that join one after another, so that prompts, decodes and drafts share steps."""
    said: list[list[int]] = [[] for _ in PARAMS]
    waiting = list(enumerate(PARAMS))
    while waiting or engine.busy:
        if waiting:
            i, params = waiting.pop(0)
            prompt = tuple(40 + 7 * i + 3 * j for j in range(5 + 30 * i))
            engine.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=5 + i))
        for event in engine.step():
            said[int(event.request_id)].append(event.token_id)
    return said


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(load_engine("tiny", EngineConfig(precision="float32", mtp=False, threads=1)))


@pytest.mark.parametrize("mtp", [False, True])
def test_the_same_text_through_a_device(expected: list[list[int]], mtp: bool) -> None:
    device_spec = DeviceSpec(torch.device("cpu"), torch.float32)
    name, text, network = load_on(device_spec, "tiny")
    engine = Engine(name, network, text, EngineConfig(mtp=mtp, max_running=4, step_tokens=128), device_spec)
    engine.warm()
    assert answers(engine) == expected
    assert engine.num_held_blocks == 0
    assert bool(engine.scheduler.num_accepted) == mtp


@pytest.mark.parametrize(
    ("precision", "major", "use_8_bit_products"), [("int8", 9, True), ("int8", 8, False), ("float32", 9, False)]
)
def test_eight_bits_are_for_devices_that_have_them_and_users_that_want_them(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, major: int, use_8_bit_products: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    device_spec = cuda_spec(precision)
    assert device_spec.use_8_bit_products is use_8_bit_products
    assert device_spec.dtype == (torch.float32 if precision == "float32" else torch.bfloat16)
    with open_checkpoint("tiny") as checkpoint:
        here = DeviceSpec(torch.device("cpu"), device_spec.dtype, device_spec.use_8_bit_products)
        assert table_of(here, checkpoint).name.endswith("-I8") is use_8_bit_products


@pytest.mark.parametrize(("precision", "major", "said"), [("float32", 9, "float32"), ("int8", 8, "an A100")])
def test_what_cannot_be_exact_on_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, major: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    with pytest.raises(NotExact, match=said):
        cuda_spec(precision, exact=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert cuda_spec("int8", exact=True).exact and not cuda_spec("int8").exact


def test_on_a_cpu_int8_is_exact_and_float32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotExact, match="float32"):
        load_engine("tiny", EngineConfig(precision="float32", exact=True))
    monkeypatch.setattr("tripool.engine.load.variants", tuple)  # no kernels were compiled
    with pytest.raises(NotExact, match="float32"):
        load_engine("tiny", EngineConfig(exact=True))


def test_a_device_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="no CUDA device"):
        load_engine("tiny", EngineConfig(device="cuda"))
    with pytest.raises(InvalidRequest, match="device is"):
        EngineConfig(device="tpu")  # type: ignore[arg-type]
