"""How much sooner a second worker, or a model that is switched back to, is ready from the model cache than from files.

    python bench/model_cache.py [--quick] [--json FILE]

Files are cold: before each load their pages are dropped (fsync, then posix_fadvise DONTNEED; mincore says how many are
left, and the row's note tells). The cache is warm, as it is when a first worker runs. Every load is a process of its
own, so that nothing else is warm by accident. Two spans of it:

- **load**: from the call that loads to an engine that can take a request. What a running server waits for when it
  switches models, and what the promise is about.
- **start**: from the start of the process to its first token. A new worker also pays for Python, torch and its
  libraries, which no model cache can shorten: the note says how much of the time that was.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness import REPO, Origin, Row, print_table, write_json
from tripool.checkpoints import locate
from tripool.fabric.folder import memory_folder

FASTER = 5.0
MODELS = REPO / "bench" / ".models"
QUOTA_GB = 8

PROGRAM = """
import json, sys, time
began = time.time()
from pathlib import Path
from tripool.cache.weight_cache import WeightCache
from tripool.config import EngineConfig
from tripool.core import Request, SamplingParams
from tripool.engine.load import load_engine
model, precision, folder, quota = sys.argv[1:]
imported = time.time()
images = WeightCache(Path(folder), int(quota)) if folder else None
engine = load_engine(model, EngineConfig(precision=precision), weight_cache=images)
loaded = time.time()
engine.add(Request(id="a", prompt_ids=(5, 6, 7, 8), params=SamplingParams(temperature=0, max_tokens=1), seed=0))
tokens = []
while engine.busy:
    tokens += [event.token_id for event in engine.step()]
said = {"began": began, "imported": imported, "loaded": loaded, "first": time.time(), "tokens": tokens}
print(json.dumps(said | {"from_memory": engine.from_weight_cache, "mb": engine.weight_bytes / 2**20}))
"""


@dataclass(frozen=True)
class Sample:
    load_s: float
    start_s: float
    import_s: float
    tokens: list[int]
    mb: float


def measure(model: Path, precision: str, folder: Path | None, *, from_memory: bool) -> Sample:
    command = [sys.executable, "-c", PROGRAM, str(model), precision, str(folder or ""), str(QUOTA_GB * 2**30)]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["from_memory"] == from_memory, "loaded from the wrong place"
    seqs = said["loaded"] - said["imported"], said["first"] - began, said["imported"] - began
    return Sample(*seqs, said["tokens"], said["mb"])


def files_of(model: Path) -> list[Path]:
    return [file for file in sorted(model.iterdir()) if file.is_file()] if model.is_dir() else [model]


def chill(model: Path) -> float:
    """Drop the pages of its files; the share of them that stayed all the same."""
    left = total = 0
    for file in files_of(model):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            resident, pages = resident_pages(opened.fileno())
            left, total = left + resident, total + pages
    return left / max(1, total)


def resident_pages(file: int) -> tuple[int, int]:
    size = os.fstat(file).st_size
    pages = -(-size // mmap.PAGESIZE)
    if not pages:
        return 0, 0
    with mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        address = ctypes.addressof(at := ctypes.c_char.from_buffer(mapped))
        found = (ctypes.c_ubyte * pages)()
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
        del at
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(one & 1 for one in found), pages


def synthetic(folder: Path, layers: int) -> Path:
    """A Llama of random bfloat16 weights with the bundled model's tokenizer: 33 MB a layer, 17 MB beside them."""
    hidden, width, heads = 1024, 4096, 16
    source = locate("tiny")
    assert source is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float32).mul_(shape[-1] ** -0.5).bfloat16()

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for part in "qkvo":
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = weight(hidden, hidden)
        for part, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            tensors[f"{prefix}.mlp.{part}_proj.weight"] = weight(*shape)
        for part in ("input", "post_attention"):
            tensors[f"{prefix}.{part}_layernorm.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    return folder


def compare(name: str, model: Path, precision: str, folder: Path, repetitions: int) -> list[Row]:
    """One after the other, cold files and cache in turn: drift of the machine favours nobody."""
    written = measure(model, precision, folder, from_memory=False)
    cold: list[Sample] = []
    warm: list[Sample] = []
    left: list[float] = []
    for _ in range(repetitions):
        left.append(chill(model))
        cold.append(measure(model, precision, None, from_memory=False))
        warm.append(measure(model, precision, folder, from_memory=True))
    assert all(sample.tokens == written.tokens for sample in (*cold, *warm)), "not the same model"
    note = f"weights {written.mb:,.0f} MB; {100 * max(left):.0f} % of the files' pages stayed in memory"
    load = [statistics.median(sample.load_s for sample in side) for side in (warm, cold)]
    start = [statistics.median(sample.start_s for sample in side) for side in (warm, cold)]
    imports_s = statistics.median(sample.import_s for sample in warm)
    details = {"first_load_with_image_s": written.load_s, "import_s": imports_s, "repetitions": repetitions}
    return [
        row(f"{name}: load", load, 1 / FASTER, note, details),
        row(
            f"{name}: start to first token",
            start,
            None,
            f"{start[1] / start[0]:.1f} x sooner; Python and torch are {imports_s:.1f} s of either",
            details,
        ),
    ]


def row(name: str, pair: Sequence[float], target: float | None, note: str, details: dict[str, float]) -> Row:
    ours, files = pair
    note = f"{files / ours:.1f} x sooner; {note}" if target is not None else note
    return Row(
        name=name,
        ours=ours,
        peer=files,
        unit="s",
        target=target,
        lower_is_better=True,
        note=note,
        details=details,
    )


def cases(quick: bool, scratch: Path) -> list[tuple[str, Path, str]]:
    found: list[tuple[str, Path, str]] = []
    for name in ("smollm2-q4_1.gguf", *(() if quick else ("smollm2",))):
        path = MODELS / name
        if path.exists():
            found.append((f"{name} int8", path, "int8"))
    if not found and (fetched := locate("smollm2")) is not None:
        found.append(("smollm2 int8", fetched, "int8"))
    if not found:
        print("SmolLM2 is not here: `python bench/peers/install.py` fetches it", file=sys.stderr)
    layers = 8 if quick else 24
    made = synthetic(scratch, layers)
    size_mb = sum(file.stat().st_size for file in files_of(made)) / 1e6
    found.append((f"synthetic {size_mb:,.0f} MB int8", made, "int8"))
    if not quick:
        found.append((f"synthetic {size_mb:,.0f} MB float32", made, "float32"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, a smaller synthetic checkpoint")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    origin, rows = Origin.now(), []
    # On disk, not in memory: a checkpoint under a memory file system is never cold.
    scratch = Path(tempfile.mkdtemp(prefix="model-cache-", dir=MODELS if MODELS.is_dir() else REPO / "bench"))
    weight_cache = Path(tempfile.mkdtemp(prefix="bench-models-", dir=memory_folder()))
    try:
        for name, model, precision in cases(options.quick, scratch):
            rows += compare(name, model, precision, weight_cache, 2 if options.quick else 5)
            for image in weight_cache.glob("*.image"):
                image.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(weight_cache, ignore_errors=True)
    print_table(rows, origin, f"Ready from the model cache, against files with a cold page cache ({FASTER:g} x)")
    if options.json:
        write_json(rows, origin, options.json)
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
