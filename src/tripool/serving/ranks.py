"""Instances of several ranks: what can be served by ranks, how much memory they share, and how a worker becomes one.

A rank is a worker with a whole engine: its own sequences, KV and scheduler. The experts of its instance are spread over
the ranks (`docs/experts.md`). Packed weights are mapped from the weight cache, so each rank can compute any expert.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tripool.config import EngineConfig
from tripool.control.instance import map_file, slabs_file
from tripool.control.rank import Rank
from tripool.engine_protocol import PoolEngine
from tripool.errors import InvalidRequest
from tripool.experts.layout import Layout
from tripool.experts.prompt_layout import PromptLayout
from tripool.experts.slabs import attach_prompts, attach_slabs, create_slabs
from tripool.fabric.folder import folder_of
from tripool.fabric.supervisor_channel import SupervisorChannel
from tripool.messages import WorkerId

_SLAB_ROWS = (256, 128, 64, 32)
_SLAB_BYTES = 256 * 2**20
"""Of one instance; with many ranks or a wide model, an exchange takes fewer rows."""
_PROMPT_ROWS = (512, 256, 128)
_PROMPT_CONTEXT = 16384
_PROMPT_ROWS_PER_RANK = 32
"""See `PROMPT_ROWS_LEAST` in `kernels/native/prompt.h`."""
_LOOK_S = 0.1


def rank_layout(model: str, config: EngineConfig, ranks: int) -> Layout:
    """Of the memory that the ranks of an instance share. Raises InvalidRequest for what only one rank can serve."""
    if config.device != "cpu" or config.precision != "int8":
        raise _refusal("ranks exchange rows in 8 bits on a CPU", "leave out --device and --precision")
    if model.partition(":")[0] == "fake":
        raise _refusal("the fake engine has no experts", "name a model with experts, such as tiny")
    from tripool.checkpoints import open_checkpoint
    from tripool.kernels.cpu8.library import variants
    from tripool.models import read_arch

    if not variants():
        raise _refusal("ranks need the 8-bit kernels", "install a C compiler and then the package again")
    with open_checkpoint(model) as checkpoint:
        arch, name = read_arch(checkpoint), checkpoint.name
        has_mtp = arch.mtp_layers > 0 and f"model.layers.{arch.layers}.eh_proj.weight" in checkpoint.infos()
    if arch.moe is None or not arch.moe_layers:
        raise _refusal(f"{name} has no experts to spread over ranks", f"start {ranks} instances of one rank")
    layouts = [
        Layout(
            ranks=ranks,
            layers=len(arch.moe_layers) + has_mtp,
            experts=arch.moe.experts,
            top_k=arch.moe.route.top_k,
            hidden=arch.hidden,
            slab_rows=rows,
        )
        for rows in _SLAB_ROWS
    ]
    return next((layout for layout in layouts if layout.num_bytes <= _SLAB_BYTES), layouts[-1])


def _refusal(problem: str, hint: str) -> InvalidRequest:
    return InvalidRequest(problem, hint=f"{hint}, or take one rank per instance", param="ranks")


def prompt_layout(model: str, config: EngineConfig, ranks: int) -> PromptLayout | None:
    """Of the memory in which the ranks of a prefill instance compute long prompts together; None where it would be too
    large."""
    from tripool.checkpoints import open_checkpoint
    from tripool.models import read_arch

    with open_checkpoint(model) as checkpoint:
        arch = read_arch(checkpoint)
    layouts = [
        PromptLayout(
            ranks=ranks,
            rows=rows,
            context=min(arch.context_tokens, _PROMPT_CONTEXT),
            hidden=arch.hidden,
            query_width=arch.query_width,
            kv_width=arch.kv_width,
            attended_width=arch.attended_width,
        )
        for rows in ((config.step_tokens,) if config.step_tokens else ()) + _PROMPT_ROWS
        if rows >= _PROMPT_ROWS_PER_RANK * ranks
    ]
    return next((layout for layout in layouts if layout.num_bytes <= _SLAB_BYTES), None)


def create_prompts(folder: Path, instance: str, layout: PromptLayout | None) -> None:
    """Before its ranks are started."""
    if layout is not None:
        create_slabs(_prompts_file(folder, instance), layout)


def _prompts_file(folder: Path, instance: str) -> Path:
    return folder / f"{instance}.prompts"


def open_rank(
    engine: PoolEngine, folder: Path, instance: str, rank: int, worker_id: WorkerId, channel: SupervisorChannel | None
) -> Rank:
    """From now on the engine's experts answer for the other ranks."""
    assert channel is not None, "a supervisor writes the maps of its ranks"
    from tripool.engine.engine import Engine
    from tripool.kernels.cpu8.exchange import NativeExchange
    from tripool.kernels.cpu8.prompts import NativePrompts
    from tripool.kernels.cpu8.sublayers import Moe8
    from tripool.kernels.cpu8.table import Stack8

    layers = engine.executor.runner.model.expert_sublayers if isinstance(engine, Engine) else []
    experts = [layer for layer in layers if isinstance(layer, Moe8)]
    if not experts or len(experts) < len(layers):
        raise _refusal(f"{engine.name} runs without the 8-bit experts that ranks exchange", "see the log")
    file, prompts = _prompts_file(folder, instance), None
    if file.exists() and isinstance(engine, Engine) and isinstance(engine.executor.runner.model.stack, Stack8):
        prompts = NativePrompts(*attach_prompts(file), rank, engine.executor.runner.model.stack)
    exchange = NativeExchange(*attach_slabs(slabs_file(folder, instance)), rank, experts, prompts=prompts)
    return Rank(exchange, map_file(folder, instance), worker_id, channel)


class ExpertProcess:
    """A rank with experts only: it answers the other ranks of its instance. The router does not know it."""

    def __init__(
        self,
        engine: PoolEngine,
        worker_id: WorkerId,
        address: str,
        channel: SupervisorChannel | None,
        *,
        instance: str,
        rank: int,
    ) -> None:
        self._folder, self._stopped = folder_of(address), threading.Event()
        self._rank = open_rank(engine, self._folder, instance, rank, worker_id, channel)

    def run(self) -> None:
        """Until `stop`; without a supervisor, while the others may need it: the gateway removes the folder at its
        end."""
        self._rank.ready()
        while not self._stopped.wait(_LOOK_S) and not (self._rank.ended and not self._folder.exists()):
            pass

    def stop(self) -> None:
        """From any thread or a signal handler."""
        self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._rank.close()
