"""Memory and time of `tripool quantize` on a random checkpoint shaped like DeepSeek-V2-Lite, 15.7 B weights.

Not a benchmark by itself: `bench/quantize.py --large FOLDER` runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from harness import Row
from tripool.checkpoints import TensorInfo, open_checkpoint
from tripool.checkpoints.write import SafetensorsWriter, write_text_files

NUM_LAYERS = 27
LARGE_GB = 6.0
CALIBRATION_TOKENS = 512
WAYS = (
    ("", "plain rounding without data", ["--tokens", "0", "--no-search"]),
    (", calibrated", f"all techniques, {CALIBRATION_TOKENS} tokens", ["--tokens", str(CALIBRATION_TOKENS)]),
)
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "vocab_size": 102400,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def v2_lite_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    hidden, prefix = 2048, f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (16 * 192, hidden), "self_attn.kv_a_proj_with_mqa": (576, hidden),
        "self_attn.kv_a_layernorm": (512,), "self_attn.kv_b_proj": (16 * 256, 512),
        "self_attn.o_proj": (hidden, 16 * 128),
    }  # fmt: skip
    mlps = {"mlp": 10944} if layer == 0 else {"mlp.shared_experts": 2816}
    if layer:
        shapes["mlp.gate"] = (64, hidden)
        mlps |= {f"mlp.experts.{i}": 1408 for i in range(64)}
    for name, width in mlps.items():
        shapes |= {f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden)}
        shapes[f"{name}.down_proj"] = (hidden, width)
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def write_large(folder: Path, num_layers: int) -> int:
    """Random BF16 weights, a shard for each layer. One pool of random numbers, read from other places each time.

    The tokenizer is the bundled model's, whose ids this vocabulary has too.
    """
    rng = torch.Generator().manual_seed(0)
    pool = torch.randn(2**28, generator=rng).mul_(0.02).bfloat16()
    weight_map, total = {}, 0
    rest = {"model.embed_tokens.weight": (102400, 2048), "lm_head.weight": (102400, 2048), "model.norm.weight": (2048,)}
    for i, shapes in enumerate([rest, *(v2_lite_shapes(layer) for layer in range(num_layers))]):
        shard = f"model-{i + 1:05}-of-{num_layers + 1:05}.safetensors"
        writer = SafetensorsWriter(folder / shard, {name: TensorInfo(shape, "BF16") for name, shape in shapes.items()})
        for name, shape in shapes.items():
            size = int(torch.Size(shape).numel())
            start = int(torch.randint(0, len(pool) - size, (1,), generator=rng))
            values = pool[start : start + size].view(shape)
            writer.put(name, values if len(shape) > 1 else torch.ones(shape, dtype=torch.bfloat16))
            total += size
        writer.finish()
        weight_map |= dict.fromkeys(shapes, shard)
        print(f"16 B: shard {i + 1} of {num_layers + 1} written", file=sys.stderr, flush=True)
    with open_checkpoint("tiny") as tiny:
        write_text_files(folder, tiny.text)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(V2_LITE | {"num_hidden_layers": num_layers}))
    return total


def large_rows(scratch: Path, *, num_layers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source, target = Path(folder) / "v2-lite", Path(folder) / "int8"
        source.mkdir()
        num_weights = write_large(source, num_layers)
        part = "" if num_layers == NUM_LAYERS else f", {num_layers} of its {NUM_LAYERS} layers"
        name = f"16 B synthetic ({num_weights / 1e9:.1f} B weights{part}): most memory of quantize"
        for label, how, options in WAYS:
            yield _row(f"{name}{label}", how, source, target, options)
            shutil.rmtree(target, ignore_errors=True)


def _row(name: str, how: str, source: Path, target: Path, options: Sequence[str]) -> Row:
    began_s = time.monotonic()
    command = [sys.executable, "-m", "tripool", "quantize", str(source), str(target), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)  # of this child alone
    wall_s = time.monotonic() - began_s
    finished = status == 0 and (target / "config.json").exists()
    stored = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    return Row(
        name=name,
        ours=used.ru_maxrss * 1024 / 1e9 if finished else None,
        peer=LARGE_GB,
        unit="GB resident",
        target=1.0,
        lower_is_better=True,
        note=f"{how}; {wall_s:.0f} s, {stored / 1e9:.1f} GB written" if finished else "it failed",
        details={"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "stored_bytes": stored},
    )
