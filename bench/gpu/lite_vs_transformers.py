"""A 16 B model of DeepSeek-V2-Lite's shape, random weights in bf16: ours against transformers' `generate`, same batch.

    python3 bench/gpu/lite_vs_transformers.py [--quick] [--prompt 256] [--count 256] [--json FILE] [--commit ID] [--toy]

64 sequences of equal length, greedy, no stops: both sides have the same weights and make as many tokens. Ours is
the executor that serves, over the CUDA table: grouped experts, paged latent attention, a captured graph for each step,
and the host between two steps. Also told: the share of greedy tokens on which both agree before they part (bf16 rounds
differently on each side), and time per step.
Then the same weights in eight bits, integers (our kernels) and e4m3 (torch's products), beside ours in bf16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from driving import Batch
from fp8_folder import blocks_of

from tripool.engine.device import DeviceSpec
from tripool.kernels.cuda.arithmetic import quantized_ops_of
from tripool.kernels.cuda.quantized_linear import QuantizedOps
from tripool.kernels.cuda.table import OnDevice, cuda_table
from tripool.kernels.ref import fp8
from tripool.kernels.weights import E4M3, INT8
from tripool.models import Model
from tripool.models.load import arch_of
from tripool.models.loader import Loader

TOY = "--toy" in sys.argv
LITE: dict[str, Any] = {
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
MINIATURE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
TARGET = 4.0


class FromModule:
    """A source (see `models.loader`) over the other side's own tensors: nothing is drawn twice.

    With an `quantized`, its linears are as if they had been stored in those eight bits, int8 by row and e4m3 by blocks.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], device: str, quantized: QuantizedOps | None) -> None:
        self._state, self.device, self._eight = state, device, quantized

    def has(self, name: str) -> bool:
        return name in self._state

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        assert self._stored(name).shape == shape, name

    def scales(self, name: str, kind: str) -> torch.Tensor | None:
        if self._eight is None or "_proj" not in name:
            return None
        if self._eight.stored == INT8:
            return self._stored(name).float().abs().amax(1) / 127.0
        weight = self._stored(name)
        return blocks_of(weight.float())[1].repeat_interleave(fp8.GROUP, 0)[: len(weight)]

    def read(self, name: str, out: torch.Tensor) -> None:
        stored, scales = self._stored(name), self.scales(name, "")
        if self._eight is not None and scales is not None:
            factors = scales[:, None] if scales.dim() == 1 else fp8.by_column(scales, stored.shape[1])
            stored = self._eight.pack(stored.float() / factors).float() * factors
        out.copy_(stored)

    def _stored(self, name: str) -> torch.Tensor:
        if name in self._state:
            return self._state[name]
        # transformers keeps a layer's experts in two tensors
        prefix, expert, projection, _ = name.rsplit(".", 3)
        both = projection in ("gate_proj", "up_proj")
        stored = self._state[f"{prefix}.{'gate_up_proj' if both else 'down_proj'}"][int(expert)]
        return stored.chunk(2)[projection == "up_proj"] if both else stored


def peer_model(settings: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("deepseek_v2", **settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: Any) -> None:
    """Weights that keep a signal alive through the layers, and logits with a clear winner now and then."""
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        elif "embed_tokens" in name:
            weight.normal_(0.0, 1.0)
        else:
            weight.normal_(0.0, (2.0 if "lm_head" in name else 0.5) * weight.shape[-1] ** -0.5)


@torch.inference_mode()
def our_model(
    settings: dict[str, Any], peer: Any, device: str, dtype: torch.dtype, quantized: QuantizedOps | None
) -> Model:
    table = cuda_table(dtype, fused=device == "cuda", quantized=quantized)
    arch = arch_of(settings | {"model_type": "deepseek_v2"}, "made up")
    return Model(arch, Loader(FromModule(peer.state_dict(), device, quantized), table, dtype, OnDevice(device)))


def peer_answers(peer: Any, prompts: torch.Tensor, count: int) -> torch.Tensor:
    from transformers import GenerationConfig

    plan = GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    peer.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = peer.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=plan)
    return ids[:, prompts.shape[1] :]


def seconds(run: Any, device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def before_parting(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens up to each sequence's first difference."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return sum(same) / sum(map(len, ours))


@dataclass(frozen=True)
class OurRun:
    answers: list[list[int]]
    whole_s: float
    first_s: float
    step_ms: float
    num_bytes: int


def our_run(
    settings: dict[str, Any],
    peer: Any,
    device: str,
    dtype: torch.dtype,
    prompts: torch.Tensor,
    count: int,
    quantized: QuantizedOps | None,
) -> OurRun:
    (sequences, length), asking = prompts.shape, prompts.tolist()
    dtype = dtype if quantized is None else torch.bfloat16
    model = our_model(settings, peer, device, dtype, quantized)
    batch = Batch(DeviceSpec(torch.device(device), dtype), model, [length + count] * sequences, mtp=False)
    runs = [batch.run(asking, [count] * sequences) for _ in range(4)][1:]  # the first one warms up
    whole_s, first_s = min(run.whole_s for run in runs), min(run.first_s for run in runs)
    step_ms = min(run.whole_s - run.first_s for run in runs) / (count - 1) * 1e3
    kind = "bf16" if quantized is None else quantized.stored
    print(f"ours, {kind}: {whole_s:.2f} s, first token {first_s:.2f} s, step {step_ms:.2f} ms", flush=True)
    return OurRun(runs[0].answers, whole_s, first_s, step_ms, model.num_bytes)


def main() -> int:
    parser = timing.arguments(__doc__)
    parser.add_argument("--toy", action="store_true", help="miniature on a CPU, without Triton and graphs")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=64)
    asked = parser.parse_args()
    device = "cpu" if TOY else "cuda"
    dtype = torch.float32 if TOY else torch.bfloat16
    settings = LITE | MINIATURE if TOY else LITE
    sequences, length, count = (3, 9, 8) if TOY else (asked.sequences, asked.prompt, asked.count)
    if asked.quick:
        count = min(count, 64)
    torch.manual_seed(7)
    took_s, peer = seconds(lambda: peer_model(settings, device, dtype), device)
    print(f"weights in {took_s:.1f} s: {sum(p.numel() for p in peer.parameters()) / 1e9:.2f} B", flush=True)
    prompts = torch.randint(0, settings["vocab_size"], (sequences, length), device=device)
    peer_answers(peer, prompts, 4)  # warms up
    times = [seconds(lambda: peer_answers(peer, prompts, count), device) for _ in range(1 if asked.quick or TOY else 2)]
    theirs = times[0][1].tolist()
    peer_s = min(took for took, _ in times)
    prefill_s = min(seconds(lambda: peer_answers(peer, prompts, 1), device)[0] for _ in range(2))
    peer_step_ms = (peer_s - prefill_s) / (count - 1) * 1e3
    print(f"transformers: {peer_s:.2f} s, first token {prefill_s:.2f} s, step {peer_step_ms:.2f} ms", flush=True)

    run = partial(our_run, settings, peer, device, dtype, prompts, count)
    ours = run(None)
    agreed = before_parting(ours.answers, theirs)
    print(f"{agreed:.1%} agreed before parting", flush=True)
    total = sequences * count
    details = {
        "our_s": ours.whole_s, "peer_s": peer_s, "our_first_s": ours.first_s, "peer_first_s": prefill_s,
        "our_step_ms": ours.step_ms, "peer_step_ms": peer_step_ms, "agreed_before_parting": agreed,
        "floor_step_ms": ours.num_bytes / 4.2e12 * 1e3, "prompt": length, "count": count, "sequences": sequences,
    }  # fmt: skip
    steps = f"step {ours.step_ms:.1f} against {peer_step_ms:.1f} ms"
    name = f"V2-Lite shape, {sequences} sequences"
    rows = [
        timing.Row(
            name=f"{name}, bf16, whole batch", ours=total / ours.whole_s, peer=total / peer_s, unit="tok/s",
            target=TARGET, note=f"{length} in, {count} out; {steps}; {agreed:.0%} alike before parting",
            details=details,
        )
    ]  # fmt: skip
    for kind, label, target in ((INT8, "int8, our kernels", 1.0), (E4M3, "fp8, by blocks", None)):
        quantized = run(quantized_ops_of(kind, fused=device == "cuda", device=device))
        note = (
            f"step {quantized.step_ms:.1f} against {ours.step_ms:.1f} ms, first token {quantized.first_s:.2f} against "
            f"{ours.first_s:.2f} s, weights {quantized.num_bytes / 1e9:.1f} against {ours.num_bytes / 1e9:.1f} GB"
        )
        details = {
            "step_ms": quantized.step_ms, "first_s": quantized.first_s, "num_bytes": quantized.num_bytes,
            "floor_step_ms": quantized.num_bytes / 4.2e12 * 1e3,
        }  # fmt: skip
        rows.append(
            timing.Row(
                name=f"{name}, {label} beside ours in bf16", ours=total / quantized.whole_s, peer=total / ours.whole_s,
                unit="tok/s", target=target, note=note, details=details,
            )
        )  # fmt: skip
    origin = timing.Origin("a toy on a CPU", "none") if TOY else timing.gpu_origin(asked.commit)
    timing.print_rows(rows, origin)
    if asked.json:
        timing.write_json(rows, origin, asked.json)
    return int(any(row.ok is False for row in rows) and not TOY)


if __name__ == "__main__":
    sys.exit(main())
