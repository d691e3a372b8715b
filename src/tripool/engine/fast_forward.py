"""Many quiet steps of the running batch at once, with the scheduler left as single steps would leave it. Pure.

A step is quiet when every sequence of the batch takes one token and nothing else can happen: no sequence arrives,
waits, ends or is short of a block. `quiet_steps` counts the next ones; `fast_forward` takes them at once. Blocks are
allocated and published in the order of single steps, so that tables, free list and index are the same.

Only for sequences that end by length alone: no grammar, no draft and no stop token.
"""

from __future__ import annotations

from collections.abc import Callable

from tripool.config import SchedulerConfig
from tripool.engine.scheduler import Scheduler
from tripool.prefill.scheduler import extend_keys
from tripool.sequence import Seq


def quiet_steps(scheduler: Scheduler, config: SchedulerConfig) -> int:
    """0: the next step has to be taken by `schedule` and `settle`, or there is no batch."""
    running = scheduler.decode.running
    if not running or scheduler.prefill.waiting or scheduler.prefill.running:
        return 0
    count = min([seq.max_new_tokens - len(seq.tokens) + seq.prompt_len for seq in running]) - 1
    # A sequence needs at most one block more than the full ones that so many tokens fill.
    while count > 0 and len(running) * (count // config.block_tokens + 1) > scheduler.pool.num_free:
        count //= 2
    return count


def fast_forward(
    scheduler: Scheduler, config: SchedulerConfig, count: int, token_of: Callable[[Seq], int], *, model: str = ""
) -> None:
    """`count` quiet steps; `token_of` says which token a sequence gets, the same in each of them."""
    running, size = scheduler.decode.running, config.block_tokens
    events: list[tuple[int, bool, int]] = []
    """(step, whether a block is full rather than needed, position in the batch), to be taken in their order."""
    for position, seq in enumerate(running):
        start = seq.num_computed
        stop = start + count
        if stop > len(seq.table) * size:
            first = len(seq.table) * size - start + 1
            events += ((step, False, position) for step in range(first, count + 1, size))
        if config.prefix_reuse and stop // size > seq.num_published:
            first = (seq.num_published + 1) * size - start
            events += ((step, True, position) for step in range(max(first, 1), count + 1, size))
        seq.num_computed = stop
        seq.tokens += [token_of(seq)] * count
    for _, is_full, position in sorted(events):
        seq = running[position]
        if is_full:
            keys = extend_keys(seq, (seq.num_published + 1) * size, size, model)
            scheduler.pool.publish(seq.table[seq.num_published], keys[seq.num_published])
            seq.num_published += 1
        else:
            seq.table += scheduler.pool.allocate(1, after=seq.table[-1])
