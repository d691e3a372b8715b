"""Memory footprint of one rank: bytes of weights, buffers and KV."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.planner.cost.setup import Routing, Setup, named_routing, place_experts
from tripool.planner.hardware import Hardware
from tripool.planner.hardware.describe import WEIGHT_BYTES
from tripool.planner.models import ModelShape


@dataclass(frozen=True, slots=True)
class Footprint:
    """Per rank, in bytes."""

    weights: float
    buffers: float
    available: float
    kv_per_token: float

    @property
    def kv(self) -> float:
        """Bytes left for KV; negative if the weights do not fit."""
        return self.available - self.weights - self.buffers

    def max_requests(self, tokens_each: float) -> float:
        """Requests per rank whose KV fits."""
        return max(0.0, self.kv) / (self.kv_per_token * tokens_each)


def footprint(hardware: Hardware, model: ModelShape, setup: Setup, routing: Routing | None = None) -> Footprint:
    routing = routing or named_routing()
    weight = WEIGHT_BYTES[setup.precision]
    layers = model.layers + setup.drafts
    replicated = layers * model.attention_params + model.dense_layers * model.dense_params
    head_bytes = 2.0 * model.head_params * (1 if model.tied_head else 2)
    experts = 0.0
    if model.moe is not None:
        placed = place_experts(model, setup.ep, routing.redundant_share, setup.balance)
        per_layer = placed.per_rank * model.expert_params + (0 if placed.shared_ranks else model.shared_params)
        experts = (model.moe_layers + setup.drafts) * per_layer
    weights = (replicated * weight + head_bytes) / setup.tp + experts * weight
    split = model.attention.kv_split(setup.tp)
    drafted = setup.drafts * model.attention.kv_width * setup.kv_element_bytes
    kv_per_token = (model.kv_bytes_per_token(setup.kv_element_bytes) + drafted) * setup.tp / split
    # A tensor-parallel group holds `tp` times a rank's requests, split as far as the cache splits.
    return Footprint(weights, hardware.buffers_bytes, hardware.hbm_bytes * hardware.hbm_usable, kv_per_token)
