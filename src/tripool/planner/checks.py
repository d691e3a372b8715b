"""Checks of files that a user may write: hardware, model configs, deployments. One table of ranges and units for each.

A new key is a new line in its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Report = Callable[[str, str], Exception]
"""Makes the error of (path of the entry, what is wrong with it)."""
_CLOSE = 0.9
_FACT_KEYS = ("value", "source", "kind")


@dataclass(frozen=True, slots=True)
class Limit:
    least: float
    most: float
    unit: str = ""
    whole: bool = False

    def problem(self, value: object) -> str | None:
        """What is wrong with a value, None if nothing."""
        kind = f"a {'whole ' if self.whole else ''}number from {self.least:g} to {self.most:g}"
        kind += f" ({self.unit})" if self.unit else ""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"is {value!r}, not {kind}"
        if not self.least <= value <= self.most or (self.whole and value != int(value)):
            return f"has the value {value!r}, not {kind}"
        return None


_SHARE, _PART = Limit(1e-3, 1.0, "a share of 1"), Limit(0.0, 1.0, "a share of 1")
_US = Limit(0.0, 1e6, "microseconds")
_GB_S = Limit(1e-3, 1e5, "GB per second")
_TFLOPS = Limit(1e-6, 1e6, "TFLOPS per chip")
_CHIPS = Limit(1, 10**8, "chips", whole=True)
_COUNT, _SIZE = Limit(0, 10**6, whole=True), Limit(1, 10**6, whole=True)

HARDWARE = {
    "chip.ranks": Limit(1, 1024, "ranks per chip", whole=True),
    "chip.node_chips": _CHIPS,
    "chip.hbm_gb": Limit(1e-3, 1e5, "GB per chip"),
    "chip.hbm_usable": _SHARE,
    "chip.hbm_tb_s": Limit(1e-6, 1e3, "TB per second and chip"),
    **{f"tflops.{name}": _TFLOPS for name in ("bf16", "fp8", "int8", "fp4")},
    "shares.gemm": _SHARE,
    "shares.memory": _SHARE,
    **{
        f"shares.{kind}_{name}": _SHARE
        for kind in ("gemm", "grouped", "split")
        for name in ("bf16", "fp8", "int8", "fp4", "int4")
    },
    **{f"shares.grouped_memory_{name}": _SHARE for name in ("bf16", "fp8", "int8", "fp4", "int4")},
    "shares.attention_compute": _SHARE,
    "shares.attention_memory": _SHARE,
    "shares.attention_8bit": _PART,
    "shares.attention_sparse": _SHARE,
    "shares.prefill_attention": _SHARE,
    "shares.prefill_attention_8bit": _PART,
    "exchange.fixed_us": _US,
    "exchange.near_us": _US,
    "exchange.per_peer_us": _US,
    "exchange.token_us": _US,
    "exchange.prefill_core_share": Limit(0.0, 0.9, "a share of the cores"),
    "exchange.decode_exposed": _PART,
    "exchange.prefill_exposed": _PART,
    "exchange.decode_gb_s": _GB_S,
    "exchange.reduce_gb_s": _GB_S,
    "overheads.layer_us": _US,
    "overheads.dense_layer_us": _US,
    "overheads.latent_us": _US,
    "overheads.latent_split_us": _US,
    "overheads.index_us": _US,
    "overheads.experts_us": _US,
    "overheads.experts_fp4_us": _US,
    "overheads.experts_bf16_us": _US,
    "overheads.experts_int4_us": _US,
    "overheads.experts_split_us": _US,
    "overheads.host_us": _US,
    "overheads.agree_us": _US,
    "overheads.step_us": _US,
    "overheads.gemm_rows": Limit(0, 1e5, "rows"),
    "overheads.gemm_tile": Limit(0, 1e5, "rows"),
    "overheads.split_rows": Limit(0, 1e5, "rows"),
    "overheads.split_tile": Limit(0, 1e5, "rows"),
    "overheads.prefill_stack": Limit(0.1, 100.0, "times"),
    "overheads.buffers_gb": Limit(0.0, 1e4, "GB per chip"),
    "cache.memory_gb_s": _GB_S,
    "cache.service_gb_s": _GB_S,
    "economy.price_per_hour": Limit(0.0, 1e6, "per chip"),
    "economy.watts": Limit(0.0, 1e6, "watts per chip"),
}
"""Entries `section.key` of a hardware description, each written { value, source, kind }."""
PLANE = {"gb_s": _GB_S, "share": _SHARE, "latency_us": _US, "domain_chips": _CHIPS, "paths": _SIZE}
"""The same of each of `[[planes]]`."""
HARDWARE_TEXTS, PLANE_TEXTS = ("name", "title", "family", "currency"), ("name", "kind", "multi_path")

MODEL = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), _SIZE),
    "vocab_size": Limit(1, 1e8, whole=True),
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_experts_per_tok",
         "moe_intermediate_size", "n_group", "topk_group", "decoder_sparse_step", "num_local_experts"), _SIZE
    ),
    **dict.fromkeys(
        ("intermediate_size", "q_lora_rank", "qk_rope_head_dim", "n_routed_experts", "num_experts", "n_shared_experts",
         "first_k_dense_replace", "shared_expert_intermediate_size", "sliding_window", "full_attention_interval",
         "index_n_heads", "index_head_dim", "index_topk", "linear_num_key_heads", "linear_num_value_heads",
         "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), Limit(0, 1e7, whole=True)
    ),
    "num_nextn_predict_layers": Limit(0, 64, whole=True),
    "mtp_num_hidden_layers": Limit(0, 64, whole=True),
}  # fmt: skip
"""Numbers of a Hugging Face config that change a shape; null is as good as missing."""
MODEL_FLAGS, MODEL_LISTS = ("tie_word_embeddings", "attention_bias", "use_qk_norm"), ("mlp_only_layers", "layer_types")
_MODEL_WHOLE = {
    "num_attention_heads": ("num_key_value_heads",),
    "n_routed_experts": ("n_group",),
}
"""Numbers that others must divide."""
_MODEL_MOST = {
    "topk_group": "n_group", "first_k_dense_replace": "num_hidden_layers", "num_experts_per_tok": "n_routed_experts",
}  # fmt: skip
"""Numbers that must not exceed others."""

_POOL = {
    "instances": Limit(1, 10**6, whole=True), "chips": _CHIPS, "ep": _SIZE, "tp": _SIZE,
    "microbatches": Limit(1, 2, whole=True), "drafts": Limit(0, 64, whole=True), "accept": _PART,
    "batch": Limit(1, 10**7, "per rank", whole=True), "expert_ranks": Limit(0, 10**6, whole=True),
}  # fmt: skip
DEPLOYMENT = {
    "version": Limit(1, 1, whole=True),
    "chips": _CHIPS,
    **{f"{pool}.{key}": limit for pool in ("prefill", "decode") for key, limit in _POOL.items()},
    "cache.gb": Limit(0.0, 1e12, "GB"),
    **{f"{section}.{key}": Limit(1e-3, 1e9, "ms") for section in ("slo", "expected") for key in ("ttft_ms", "tpot_ms")},
    "workload.input_tokens": Limit(1, 1e8),
    "workload.output_tokens": Limit(1, 1e8),
    "workload.cached_share": _PART,
    "expected.requests_per_s": Limit(0.0, 1e9),
    "expected.cost_per_million": Limit(0.0, 1e12),
}
DEPLOYMENT_TEXTS = ("model", "hardware", "shared", "prefill.precision", "decode.precision", "decode.hardware")


def check_hardware(tree: Mapping[str, Any], report: Report) -> None:
    sections = {path.partition(".")[0] for path in HARDWARE}
    _check_known(tree, (*HARDWARE_TEXTS, *sections, "planes"), "", report)
    for section in sorted(sections & tree.keys()):
        limits = {path.partition(".")[2]: limit for path, limit in HARDWARE.items() if path.startswith(section + ".")}
        _check_facts(tree[section], limits, (), section, report)
    planes = tree.get("planes", [])
    for index, plane in enumerate(planes if isinstance(planes, list) else []):
        _check_facts(plane, PLANE, PLANE_TEXTS, f"planes[{index}]", report)


def _check_facts(table: object, limits: Mapping[str, Limit], texts: Iterable[str], path: str, report: Report) -> None:
    if not isinstance(table, Mapping):
        raise report(path, "is not a table")
    _check_known(table, (*limits, *texts), path + ".", report)
    for key in limits.keys() & table.keys():
        fact, name = table[key], f"{path}.{key}"
        if not isinstance(fact, Mapping):
            raise report(name, f"is {fact!r}, not {{ value, source }}")
        _check_known(fact, _FACT_KEYS, name + ".", report)
        if "value" not in fact:
            raise report(name, "has no value")
        problem = limits[key].problem(fact["value"])
        if problem:
            raise report(name, problem)


def check_config(config: Mapping[str, Any], report: Report) -> None:
    """Keys that no shape reads are left alone, but those that look like one that a shape reads."""
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]  # the language model beside an image encoder
    known = (*MODEL, *MODEL_FLAGS, *MODEL_LISTS)
    for key in config.keys() - set(known):
        close = get_close_matches(str(key), known, 1, _CLOSE)
        if close and close[0] not in config:
            raise report(str(key), f"is not known; is it '{close[0]}'?")
    for key, value in config.items():
        problem = MODEL[key].problem(value) if key in MODEL and value is not None else None
        if key in MODEL_FLAGS and not isinstance(value, (bool, type(None))):
            problem = f"is {value!r}, not true or false"
        if key in MODEL_LISTS and not isinstance(value, (list, type(None))):
            problem = f"is {value!r}, not a list"
        if problem:
            raise report(key, problem)
    for whole, parts in _MODEL_WHOLE.items():
        for part in parts:
            if (config.get(whole) or 0) % (config.get(part) or 1):
                raise report(part, f"is {config[part]}, which does not divide {whole} ({config[whole]})")
    for key, limit in _MODEL_MOST.items():
        if config.get(key) and config.get(limit) and config[key] > config[limit]:
            raise report(key, f"is {config[key]}, more than {limit} ({config[limit]})")


def check_deployment(tree: Mapping[str, Any], report: Report) -> None:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    _check_known(flat, (*DEPLOYMENT, *DEPLOYMENT_TEXTS), "", report)
    for path in DEPLOYMENT.keys() & flat.keys():
        problem = DEPLOYMENT[path].problem(flat[path])
        if problem:
            raise report(path, problem)
    if not isinstance(flat.get("shared", False), bool):
        raise report("shared", f"is {flat['shared']!r}, not true or false")


def _check_known(table: Mapping[str, Any], known: Iterable[str], path: str, report: Report) -> None:
    names = list(known)
    for key in table:
        if key not in names:
            close = get_close_matches(str(key), names, 1)
            hint = f"; is it '{close[0]}'?" if close else f"; known: {', '.join(names)}"
            raise report(f"{path}{key}", f"is not known{hint}")
