"""Paged latent attention and its prologue in plain torch: the oracle of the CUDA kernels."""

import torch

from tripool.kernels.ref.norm import rms_norm
from tripool.kernels.ref.rope import rope_


def mla_decode(
    q_latent: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    rank: int = 512,
) -> torch.Tensor:
    """q_latent [B, Q, H, rank + rope]; kv_blocks [blocks, 64, rank + rope]; block_table [B, width]; seq_lens [B], query
    tokens included; result [B, Q, H, rank], computed in float32."""
    batch, queries, heads, width = q_latent.shape
    out = torch.zeros(batch, queries, heads, rank, device=q_latent.device)
    for b in range(batch):
        for i in range(queries):
            seen = int(seq_lens[b]) - queries + 1 + i
            if seen > 0:
                pages = block_table[b, : -(-seen // kv_blocks.shape[1])].long()
                rows = kv_blocks[pages].reshape(-1, width)[:seen].float()
                weights = (q_latent[b, i].float() @ rows.T * scale).softmax(-1)
                out[b, i] = weights @ rows[:, :rank]
    return out.to(q_latent.dtype)


def mla_prologue(
    down: torch.Tensor,
    q_gain: torch.Tensor | None,
    kv_gain: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_blocks: torch.Tensor,
    *,
    q_eps: float,
    kv_eps: float,
    int8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the query part (quantised to 8 bits per row if `int8`) and write latent and rotated key into
    the cache.
    """
    rank, q_rank = len(kv_gain), 0 if q_gain is None else len(q_gain)
    q, latent, key = down.float().split([q_rank, rank, down.shape[1] - q_rank - rank], dim=1)
    key = key[:, None].clone()
    rope_(key, cos_sin[positions])
    latent = rms_norm(latent, kv_gain.float(), kv_eps)
    written = slot_mapping >= 0
    kv_blocks.view(-1, kv_blocks.shape[2])[slot_mapping[written]] = torch.cat((latent, key[:, 0]), 1)[written].to(
        kv_blocks.dtype
    )
    normed = q if q_gain is None else rms_norm(q, q_gain.float(), q_eps)
    if not int8:
        return normed.to(down.dtype), down.new_empty(0, dtype=torch.float32)
    largest = normed.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return (normed * (127 / largest)).round().to(torch.int8), (largest / 127)[:, 0]


def rope_queries(q_rope: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    rotated = q_rope.float()
    rope_(rotated, cos_sin[positions])
    out.copy_(rotated)
