"""Starts of a 16 B model in INT8 on a GPU, from nothing to the first token, by stage; and starts that must be refused.

    python3 bench/gpu/start.py [--quick] [--json FILE] [--commit ID] [--folder DIR] [--small]

Writes a checkpoint of V2-Lite's shape with random integers (its files then are in the page cache) and starts a server
on it twice: `tripool serve` where its HTTP packages are installed, else the engine that it assembles, in a process of
its own. Triton's cache is empty before the first start. Then every sequence of a full batch gets a long prompt, which
must not run out of memory. Last, two starts with too little memory: KV that cannot fit, and a GPU that another process
has filled. `--quick`: a third of the layers. `--small`: narrow layers on a CPU. A checkpoint and compiled kernels that
are in `--folder` already are used.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timing
import torch
from beside_shapes import settings_of

SECOND_START_S = 20.0
WITHIN_S = 150.0
"""Deadline of one start."""
HOG_BYTES = 130 * 2**30
PROMPT_TOKENS, FIRST_PROMPT_TOKENS = 2048, 256
HTTP_PACKAGES = ("typer", "fastapi", "uvicorn")


# ---- the checkpoint -------------------------------------------------------------------------------------------------


def tensors_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a DeepSeek-V2 checkpoint without a low rank of queries."""
    hidden, heads, rank = (settings[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    nope, rope, v = (settings[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((f"{prefix}.{part}_proj.weight", (width, hidden)) for part in ("gate", "up"))
        yield f"{prefix}.down_proj.weight", (hidden, width)

    yield "model.embed_tokens.weight", (settings["vocab_size"], hidden)
    yield "lm_head.weight", (settings["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield from ((f"{layer}.{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
        attention = f"{layer}.self_attn"
        yield f"{attention}.kv_a_layernorm.weight", (rank,)
        yield f"{attention}.q_proj.weight", (heads * (nope + rope), hidden)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
        yield f"{attention}.kv_b_proj.weight", (heads * (nope + v), rank)
        yield f"{attention}.o_proj.weight", (hidden, heads * v)
        if i < settings["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", settings["intermediate_size"])
            continue
        width = settings["moe_intermediate_size"]
        yield f"{layer}.mlp.gate.weight", (settings["n_routed_experts"], hidden)
        yield from mlp(f"{layer}.mlp.shared_experts", settings["n_shared_experts"] * width)
        for expert in range(settings["n_routed_experts"]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", width)


def write_checkpoint(folder: Path, settings: Mapping[str, Any], device: str) -> None:
    """Linear layers as random integers with a scale for each row, the rest in bfloat16."""
    from tripool.checkpoints import TensorInfo, open_checkpoint
    from tripool.checkpoints.write import SafetensorsWriter, int8_layout, write_text_files

    folder.mkdir(parents=True, exist_ok=True)
    shapes = dict(tensors_of(settings))
    infos = {name: TensorInfo(shape, "I8" if "_proj" in name else "BF16") for name, shape in shapes.items()}
    infos |= {f"{name}_scale": TensorInfo((shape[0], 1), "F32") for name, shape in shapes.items() if "_proj" in name}
    draws = torch.Generator(device).manual_seed(11)
    writer = SafetensorsWriter(folder / "model.safetensors", infos)
    for name, shape in shapes.items():
        if "_proj" in name:
            drawn = torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=draws)
            scale = 0.5 * shape[1] ** -0.5 / 73.3  # the integers' deviation
            writer.put(f"{name}_scale", torch.full((shape[0], 1), scale))
        elif len(shape) == 1:
            drawn = torch.ones(shape, dtype=torch.bfloat16, device=device)
        else:
            spread = 1.0 if "embed" in name else 2.0 * shape[1] ** -0.5
            drawn = spread * torch.randn(shape, dtype=torch.bfloat16, device=device, generator=draws)
        writer.put(name, drawn.cpu())
    writer.finish(sync=False)
    with open_checkpoint("tiny") as tiny:
        write_text_files(folder, tiny.text)
    layout = int8_layout(["Linear"], ["lm_head"])
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": layout}))


# ---- one start, in a process of its own -----------------------------------------------------------------------------


class Stages(logging.Handler):
    """Collects the stages that the engine logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "stage"):
            names = ("stage", "took_s", "bytes", "step_tokens", "capture_s", "from_weight_cache")
            self.found.append({name: getattr(record, name) for name in names if hasattr(record, name)})


def child(asked: argparse.Namespace) -> int:
    """What `tripool serve` assembles, up to the first token. Prints one JSON object."""
    from tripool.errors import TripoolError

    stages, logger = Stages(), logging.getLogger("tripool")
    logger.addHandler(stages)
    logger.setLevel(logging.INFO)
    try:
        said = _start(asked)
    except TripoolError as error:
        said = {"error": error.code, "reason": str(error)}
    print(json.dumps({**said, "stages": stages.found}), flush=True)
    return 0


def _start(asked: argparse.Namespace) -> dict[str, Any]:
    from tripool.cache.weight_cache import WeightCache
    from tripool.config import EngineConfig
    from tripool.engine.load import load_engine

    imported_s = time.time() - asked.began
    cache = None if asked.weight_cache is None else WeightCache(asked.weight_cache, 2**36)
    config = EngineConfig(device=asked.device, kv_gb=asked.kv_gb)
    engine = load_engine(str(asked.child), config, weight_cache=cache)
    loaded_s = time.time() - asked.began
    first_token_s = None
    engine.add(_request("first", FIRST_PROMPT_TOKENS))
    while first_token_s is None:
        if engine.step():
            first_token_s = time.time() - asked.began
    said = {
        "import_s": imported_s, "loaded_s": loaded_s, "first_token_s": first_token_s, "kv_bytes": engine.kv_bytes,
        "step_tokens": engine.step_tokens, "kv_tokens": engine.num_blocks * engine.block_tokens,
    }  # fmt: skip
    if not asked.full_batch:
        return said
    for i in range(engine.max_running):
        engine.add(_request(str(i), min(PROMPT_TOKENS, engine.context_tokens - 16)))
    began_s = time.time()
    while engine.busy:
        engine.step()
    failed = len(engine.take_failed())
    said |= {"full_batch_s": time.time() - began_s, "asked": engine.max_running, "failed": failed}
    if asked.device == "cuda":
        said["free_bytes"] = torch.cuda.mem_get_info()[0]
    return said


def _request(name: str, num_tokens: int) -> Any:
    from tripool.core import Request, SamplingParams

    prompt = tuple((7 * i + sum(map(ord, name))) % 300 for i in range(num_tokens))
    params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    return Request(id=name, prompt_ids=prompt, params=params, seed=1)


# ---- starts ---------------------------------------------------------------------------------------------------------


def started(folder: Path, device: str, cache: Path, *options: str) -> dict[str, Any]:
    """The engine's start in a fresh process."""
    program = [sys.executable, __file__, "--child", str(folder), "--device", device, "--began", str(time.time())]
    done = subprocess.run(
        [*program, *options], env=_environment(cache), capture_output=True, text=True, timeout=WITHIN_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"a start failed:\n{done.stderr[-3000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def served(folder: Path, device: str, cache: Path, *options: str) -> dict[str, Any]:
    """`tripool serve` up to the first token that a client has."""
    serve = ["-m", "tripool", "serve", str(folder), "--device", device, "--port", "0", "--log-format", "json", *options]
    began_s = time.time()
    process = subprocess.Popen(
        [sys.executable, *serve], env=_environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said: dict[str, Any] = {"stages": []}
    deadline = threading.Timer(WITHIN_S, process.kill)
    deadline.start()
    assert process.stderr is not None
    try:
        for line in process.stderr:
            fields = json.loads(line) if line.startswith("{") else {}
            if "stage" in fields:
                said.setdefault("import_s", time.time() - began_s - fields["took_s"])
                said["stages"].append({name: fields[name] for name in fields if name in ("stage", "took_s", "bytes")})
            elif fields.get("error"):
                said |= {"error": fields["error"], "reason": fields.get("reason", "")}
            elif fields.get("message") == "ready":
                said["loaded_s"] = time.time() - began_s
                _complete(fields["url"])
                said["first_token_s"] = time.time() - began_s
                process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        deadline.cancel()
        process.kill()
        process.wait(30)
    if "first_token_s" not in said and "error" not in said:
        raise SystemExit(f"no first token within {WITHIN_S:g} s")
    return said


def _complete(url: str) -> None:
    body = {"prompt": list(range(10, 10 + FIRST_PROMPT_TOKENS)), "max_tokens": 1, "temperature": 0}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()


def _environment(cache: Path) -> dict[str, str]:
    paths = [str(timing.REPO / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(cache)}


# ---- rows -----------------------------------------------------------------------------------------------------------


def told(said: Mapping[str, Any]) -> str:
    parts = [f"import {said.get('import_s', 0):.1f}"]
    parts += [f"{stage['stage']} {stage['took_s']:.1f}" for stage in said["stages"]]
    return ", ".join([*parts, f"first token after {said['first_token_s'] - said['loaded_s']:.1f} s"])


def start_row(name: str, said: Mapping[str, Any], target: float | None) -> timing.Row:
    if "error" in said:
        raise SystemExit(f"{name}: {said['reason']}")
    return timing.Row(
        name=name, ours=said["first_token_s"], peer=SECOND_START_S, unit="s", target=target, lower_is_better=True,
        note=told(said), details=said,
    )  # fmt: skip


def refusal_row(name: str, said: Mapping[str, Any]) -> timing.Row:
    """1: refused with the error for it."""
    refused = float(said.get("error") == "device_out_of_memory")
    return timing.Row(
        name=name, ours=refused, peer=1.0, unit="refusals", target=1.0, note=said.get("reason", "it started"),
        details=said,
    )  # fmt: skip


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="narrow layers, on a CPU, without refusals")
    parser.add_argument("--folder", type=Path, help="of the checkpoint; if not given, a temporary one")
    parser.add_argument("--engine", action="store_true", help="start the engine also where the HTTP packages are")
    parser.add_argument("--weight-cache", type=Path, help="also start from packed weights in this folder")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--kv-gb", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--full-batch", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        return child(asked)
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="start-"))
    try:
        rows = measured(asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    origin = timing.Origin("narrow layers on a CPU", "none") if asked.small else timing.gpu_origin(asked.commit)
    timing.print_rows(rows, origin)
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    return int(any(row.ok is False for row in rows) and not asked.small)


def measured(asked: argparse.Namespace, folder: Path) -> list[timing.Row]:
    device = "cpu" if asked.small else "cuda"
    settings = settings_of("lite", small=asked.small)
    if asked.quick:
        settings = {**settings, "num_hidden_layers": -(-settings["num_hidden_layers"] // 3)}
    place = (folder / "lite", device, folder / "triton")
    if not (folder / "lite" / "config.json").exists():  # which is written last
        began_s = time.time()
        write_checkpoint(folder / "lite", settings, device)
        print(f"written in {time.time() - began_s:.1f} s", flush=True)
    torch.cuda.empty_cache()
    size = f"{(folder / 'lite' / 'model.safetensors').stat().st_size / 1e9:.1f} GB in INT8"
    http = not asked.engine and all(importlib.util.find_spec(name) for name in HTTP_PACKAGES)
    start, kind = (served, "tripool serve") if http else (started, "engine")
    rows = []

    def add(row: timing.Row) -> None:
        rows.append(row)
        print(row, row.note, flush=True)

    if not (folder / "triton").exists():
        add(start_row(f"{size}, {kind}: first start, kernels not compiled", start(*place), None))
    if http:
        add(start_row(f"{size}, {kind}: second start, files in the page cache", start(*place), 1.0))
    full = started(*place, "--full-batch")
    add(start_row(f"{size}, engine: second start, files in the page cache", full, 1.0))
    answered, note = full["asked"] - full["failed"], f"{full['full_batch_s']:.1f} s"
    add(timing.rate_row("its answers to a full batch", answered, full["asked"], "answers", target=1.0, note=note))
    if asked.weight_cache is not None:
        for name in ("writing the weight cache", "from the weight cache"):
            cached = started(*place, "--weight-cache", str(asked.weight_cache))
            add(start_row(f"{size}, engine: start {name}", cached, None))
    if not asked.small:
        add(refusal_row("KV of 400 GB", start(*place, "--kv-gb", "400")))
        hog = torch.empty(min(HOG_BYTES, torch.cuda.mem_get_info()[0] - 2**30), dtype=torch.uint8, device=device)
        add(refusal_row(f"{hog.nbytes / 2**30:.0f} GB in use by another process", start(*place)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
