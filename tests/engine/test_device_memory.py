"""Out of memory on a device: a typed error with numbers before serving, and failed requests while serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine import device
from tripool.engine.device import DeviceSpec, load_on, load_warm_on
from tripool.engine.device_memory import device_bytes, measured_bytes, within_memory
from tripool.engine.device_runner import DeviceRunner
from tripool.engine.engine import Engine
from tripool.engine.load import load_engine
from tripool.engine.memory import DeviceBytes, LargestStep
from tripool.engine.overlapped import OverlappedEngine
from tripool.errors import DeviceOutOfMemory
from tripool.models import Model
from tripool.text.files import TextFiles

GB = 2**30
CPU = torch.device("cpu")
SPEC = DeviceSpec(CPU, torch.float32)
REFUSED = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of ...")

Loaded = tuple[str, TextFiles, Model]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card of 80 GB, of which 3 are free and torch holds 2 without using them. Returns the calls that release."""
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 9 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 7 * GB)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("empty_cache"))
    return released


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return load_on(SPEC, "tiny")


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def test_what_torch_holds_without_using_it_counts_as_free() -> None:
    assert device_bytes(CPU) == DeviceBytes(5 * GB, 80 * GB)


@pytest.mark.parametrize(
    ("error", "known", "needed"),
    [
        (REFUSED, None, "20.5 GB needed"),
        (REFUSED, 30 * GB, "30.0 GB needed"),
        (torch.OutOfMemoryError("Tried to allocate 512.00 MiB."), None, "0.5 GB needed"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), None, "0.0 GB needed"),
        (RuntimeError("CUDA error: out of memory"), None, "0.0 GB needed"),
    ],
    ids=["torch", "known", "megabytes", "cublas", "driver"],
)
def test_out_of_memory_becomes_one_typed_error(
    card: list[str], error: Exception, known: int | None, needed: str
) -> None:
    with pytest.raises(DeviceOutOfMemory, match=needed) as refused, within_memory("weights", CPU, known):
        raise error
    assert refused.value.__cause__ is error and refused.value.status == 507
    assert refused.value.message.startswith("weights: ") and "5.0 GB of 80.0 GB are free" in refused.value.message
    assert "--step-tokens" in refused.value.hint and card == ["empty_cache"]


def test_the_end_of_a_failed_capture_does_not_hide_it() -> None:
    ended = RuntimeError("operation failed due to a previous error during capture")
    ended.__context__ = REFUSED
    with pytest.raises(DeviceOutOfMemory, match=r"20\.5 GB"), within_memory("capture", CPU):
        raise ended


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), within_memory("weights", CPU):
        raise RuntimeError("shape mismatch")


def test_measuring_sees_the_lowest_point_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    free = [60 * GB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[0], 80 * GB))

    def run() -> None:
        assert card == ["empty_cache"]
        free[0] -= 7 * GB

    assert measured_bytes(run, CPU) == 7 * GB
    assert len(card) == 2


def test_weights_that_do_not_fit_are_refused_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "load_warm", raising(REFUSED))
    with pytest.raises(DeviceOutOfMemory, match=r"the weights of tiny: 0\.1 GB needed"):
        load_warm_on(SPEC, "tiny", None)


def test_kv_that_does_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch, tiny: Loaded) -> None:
    name, text, model = tiny
    monkeypatch.setattr(DeviceRunner, "_memory", raising(REFUSED))
    with pytest.raises(DeviceOutOfMemory, match=r"KV memory: 400\.0 GB needed"):
        Engine(name, model, text, EngineConfig(kv_gb=400), SPEC)


@pytest.mark.parametrize("mtp", [False, True])
def test_kv_takes_what_the_largest_step_leaves(monkeypatch: pytest.MonkeyPatch, tiny: Loaded, mtp: bool) -> None:
    """The step really runs, here on a CPU; what it takes of a card is given."""
    name, text, model = tiny
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GB // 2, 80 * GB))
    ran: list[LargestStep] = []
    run_largest = DeviceRunner.run_largest

    def run(self: DeviceRunner, largest: LargestStep) -> torch.Tensor:
        ran.append(largest)
        assert self.kv_bytes < 2**22, "with hardly any KV"
        logits = run_largest(self, largest)
        assert logits.shape == (largest.max_running * (1 + mtp), model.arch.vocab)
        return logits

    monkeypatch.setattr(DeviceRunner, "run_largest", run)
    monkeypatch.setattr(device, "measured_bytes", lambda run, _: run() or GB)
    spec = DeviceSpec(CPU, torch.float32, whole_device=True)
    engine = Engine(name, model, text, EngineConfig(max_running=3, step_tokens=140, mtp=mtp), spec)
    assert ran == [LargestStep(3, 140, model.arch.context_tokens)]
    block = model.arch.block_bytes(mtp=mtp)
    assert engine.num_blocks == (3 * GB // 2 + 2 * GB - GB - 80 * GB // 50) // block - 1
    assert engine.step_tokens == 140


@pytest.mark.parametrize("alone", [True, False])
def test_a_start_logs_its_stages_and_kv_fills_the_device_of_one_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    monkeypatch.setattr(device, "cuda_spec", lambda *_, **__: SPEC)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 8 * GB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 31 * GB // 4)  # 1.25 GB are free
    config = EngineConfig(device="cuda", mtp=False, max_running=2, step_tokens=80)
    told: list[str] = []
    with caplog.at_level("INFO", "tripool"):
        engine = load_engine("tiny", config, progress=told.append, shares_device=not alone)
    stages = [record.__dict__ for record in caplog.records if "stage" in record.__dict__]
    assert [stage["stage"] for stage in stages] == ["device", "weights", "kv", "warm-up"]
    assert all(stage["took_s"] >= 0 for stage in stages)
    assert (stages[1]["bytes"], stages[2]["bytes"]) == (engine.weight_bytes, engine.kv_bytes)
    assert (engine.kv_bytes / GB == pytest.approx(0.25, abs=0.01)) == alone, "less a margin of 1; else 8 contexts"
    assert "loading tiny" in told[0] and any("50 % of 0.0 GB" in line for line in told)
    engine.add(_request("first"))
    while engine.busy:
        engine.step()
    assert not engine.take_failed()


def test_a_device_that_cannot_be_opened_is_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", raising(RuntimeError("CUDA error: out of memory")))
    with pytest.raises(DeviceOutOfMemory, match="the GPU itself"), within_memory("the GPU itself", CPU):
        raise RuntimeError("CUDA error: out of memory")


def test_a_step_without_memory_fails_its_requests_and_the_engine_stays(
    monkeypatch: pytest.MonkeyPatch, tiny: Loaded, card: list[str]
) -> None:
    name, text, model = tiny
    config = EngineConfig(max_running=4, mtp=False, kv_gb=0.02)
    engine = OverlappedEngine(name, model, text, config, SPEC)
    step_logits = engine.executor.runner.step_logits
    for i in range(5):
        monkeypatch.setattr(engine.executor.runner, "step_logits", raising(REFUSED))
        engine.add(_request(str(i)))
        assert engine.step() == []
        assert engine.take_failed() == [str(i)] and len(card) == i + 1
        assert not engine.busy and engine.num_held_blocks == 0
    monkeypatch.setattr(engine.executor.runner, "step_logits", step_logits)
    engine.add(_request("after"))
    events = []
    while engine.busy:
        events += engine.step()
    assert len(events) == 4


def test_other_faults_still_end_the_engine(monkeypatch: pytest.MonkeyPatch, tiny: Loaded) -> None:
    name, text, model = tiny
    engine = OverlappedEngine(name, model, text, EngineConfig(max_running=4, mtp=False, kv_gb=0.02), SPEC)
    monkeypatch.setattr(engine.executor.runner, "step_logits", raising(RuntimeError("a bug")))
    for i in range(2):
        engine.add(_request(str(i)))
        assert engine.step() == []
    engine.add(_request("2"))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()


def _request(name: str) -> Request:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return Request(id=name, prompt_ids=(5, 6, 7), params=params, seed=1)
