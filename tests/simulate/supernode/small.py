"""A deployment of a few workers with little memory, so that queues, preemptions and evictions happen soon."""

from __future__ import annotations

from tripool.config import AdmissionConfig, RouterConfig, SchedulerConfig
from tripool.simulate.supernode.layout import Layout, Links, PoolLayout
from tripool.simulate.supernode.step_times import DecodeTimes, PrefillTimes


def small_layout(
    *,
    prefills: int = 2,
    decodes: int = 1,
    workers: int = 3,
    blocks: int = 24,
    running: int = 4,
    member_slots: int = 64,
    tpot_s: float = 0.05,
) -> Layout:
    size = 16
    prefill = SchedulerConfig(num_blocks=blocks * 2, block_tokens=size, step_tokens=64, max_running=8)
    decode = SchedulerConfig(
        num_blocks=blocks, block_tokens=size, step_tokens=running + size, max_running=running, prefix_reuse=False
    )
    links = Links(
        transfer_bytes_per_s=1e6, send_bytes_per_s=4e6, transfer_s=1e-5, cache_bytes_per_s=2e6, cache_s=2e-6,
        hop_s=3e-5, totals=(("memory", 1e7), ("transfer", 1e7), ("service", 1e6)),
    )  # fmt: skip
    return Layout(
        title="small", chips=4, node_chips=2,
        prefill=PoolLayout(instances=prefills, workers=1, chips=1, config=prefill),
        decode=PoolLayout(instances=decodes, workers=workers, chips=workers, config=decode),
        prefill_times=PrefillTimes(lambda tokens, context: 0.002 + tokens * 1e-4 + tokens * context * 1e-7),
        decode_times=DecodeTimes(lambda n, context: (0.004 + n * 5e-4 + n * context * 2e-6, 0.002)),
        replay_times=PrefillTimes(lambda tokens, context: tokens * 1e-4),
        links=links, num_members=2, member_slots=member_slots, block_bytes=1024, token_bytes=64,
        context_tokens=blocks * size, ttft_s=0.5, tpot_s=tpot_s,
        router=RouterConfig(), admission=AdmissionConfig(),
    )  # fmt: skip
