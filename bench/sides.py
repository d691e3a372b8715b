"""Who is compared: every engine with every model file, how it is started, and how it is asked for work.

Knows the peers' settings (each gets what its own documentation advises for CPUs) and nothing of workloads or bars.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import REPO, Worker, WorkerFailed

PROGRAMS = REPO / "bench" / "peers"
MODELS = REPO / "bench" / ".models"
LOGS = MODELS / "logs"
PEERS_ENV = REPO / ".venv-peers"
INSTALL = "python bench/peers/install.py"
LOAD_WITHIN_S, RUN_WITHIN_S = 600.0, 900.0
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Side:
    """One engine with one model. `peer` is the engine's name where it is not ours."""

    name: str
    program: str
    model: str
    precision: str = "float32"
    peer: str | None = None


PEER_NAMES = ("transformers", "llama.cpp", "vllm")

SIDES = {
    "smollm2": (
        Side("float32", "ours.py", "smollm2"),
        Side("int8", "ours.py", "smollm2", precision="int8"),
        Side("transformers", "hf_transformers.py", "smollm2", peer="transformers"),
        Side("llama.cpp Q4_1", "llama_cpp.py", "smollm2-q4_1.gguf", peer="llama.cpp"),
        Side("llama.cpp Q8_0", "llama_cpp.py", "smollm2-q8_0.gguf", peer="llama.cpp"),
        Side("vllm", "vllm_cpu.py", "smollm2", peer="vllm"),
    ),
    "mla163m": (
        Side("float32", "ours.py", str(MODELS / "mla163m")),
        Side("int8", "ours.py", str(MODELS / "mla163m"), precision="int8"),
        Side("transformers", "hf_transformers.py", "mla163m", peer="transformers"),
        Side("llama.cpp BF16", "llama_cpp.py", "mla163m-bf16.gguf", peer="llama.cpp"),
        Side("vllm", "vllm_cpu.py", "mla163m", peer="vllm"),
    ),
}


def wanted_sides(model: str, precisions: Sequence[str], peers: Sequence[str]) -> list[Side]:
    return [side for side in SIDES[model] if (side.peer in peers if side.peer else side.precision in precisions)]


@dataclass
class Loaded:
    """A side that is up: its worker, what it said of itself, and its latest answers (to see that sides agree)."""

    side: Side
    worker: Worker
    said: dict[str, Any]
    answers: list[list[int]] = field(default_factory=list)

    def prepare(self, warm_up: Sequence[list[int]], concurrency: int, context_tokens: int) -> None:
        """Make room for a workload and run a little of it, outside any clock."""
        self.worker.ask(do="prepare", concurrency=concurrency, context_tokens=context_tokens, within_s=LOAD_WITHIN_S)
        self.wall_s(warm_up, min(WARM_UP_TOKENS, context_tokens - len(warm_up[0])))

    def wall_s(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Seconds for all prompts at once, by the worker's clock."""
        reply = self.worker.ask(do="run", prompts=prompts, max_tokens=max_tokens, within_s=RUN_WITHIN_S)
        self.answers = reply["token_ids"]
        self.worker.wait_idle()
        return float(reply["wall_s"])

    @property
    def bits(self) -> str:
        weights, activations = self.said["bits"]
        return f"w{weights} a{activations}"


def load(side: Side, threads: int) -> Loaded:
    """Start a side and have it load its model. What it prints stays under `LOGS` for whoever must find out why not."""
    command = _command(side, threads)
    LOGS.mkdir(parents=True, exist_ok=True)
    worker = Worker(command, LOGS / f"{Path(side.model).name} {side.name}.log")
    model = side.model if side.peer is None else str(MODELS / side.model)
    try:
        said = worker.ask(do="load", model=model, threads=threads, precision=side.precision, within_s=LOAD_WITHIN_S)
        worker.wait_idle()
    except WorkerFailed as failure:
        worker.close()
        hint = f" (run: {INSTALL})" if "No module named" in str(failure) else ""
        raise WorkerFailed(f"{failure}{hint}") from None
    return Loaded(side, worker, said)


def _command(side: Side, threads: int) -> list[str]:
    if side.peer is None:
        return [sys.executable, str(PROGRAMS / side.program)]
    python = PEERS_ENV / "bin" / "python"
    if not python.exists() or not (MODELS / side.model).exists():
        raise WorkerFailed(f"not installed (run: {INSTALL})")
    settings = peer_settings(side.peer, threads)
    return ["env", *(f"{name}={value}" for name, value in settings.items()), str(python), str(PROGRAMS / side.program)]


def peer_settings(peer: str, threads: int) -> dict[str, str]:
    """Environment that a peer's documentation advises for CPUs."""
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if peer == "vllm":
        preload = [str(PEERS_ENV / "lib" / "libiomp5.so"), find_library("tcmalloc_minimal")]
        settings |= {
            "LD_PRELOAD": ":".join(library for library in preload if library),
            "KMP_BLOCKTIME": "1",
            # One process: nothing polls between runs, and the threads are those of OMP_NUM_THREADS.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return settings
