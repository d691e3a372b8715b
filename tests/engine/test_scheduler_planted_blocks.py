"""A test of the tests: bugs in holding, naming and sharing blocks do not get past the simulation."""

from __future__ import annotations

import pytest

import tripool.cache.keys as cache_keys
import tripool.prefill.scheduler as prefill_scheduler
from tripool.cache import BlockPool, root_key
from tripool.core import FinishReason
from tripool.engine.scheduler import Scheduler
from tripool.prefill import PrefillScheduler
from tripool.sequence import Seq, Task

from .scheduler_plant import Bugs

bug = Bugs()


@bug("1 refs, 0 owners")
def cancel_forgets_to_release(patch: pytest.MonkeyPatch) -> None:
    retire = Scheduler._retire

    def leaky(self: Scheduler, seq: Seq, finish: FinishReason) -> None:
        if finish == "abort":
            seq.table = []
        retire(self, seq, finish)

    patch.setattr(Scheduler, "_retire", leaky)


@bug("1 refs, 0 owners")
def finished_request_never_releases(patch: pytest.MonkeyPatch) -> None:
    def leaky(self: Scheduler, seq: Seq, finish: FinishReason) -> None:
        (self.decode if seq in self.decode.running else self.prefill).remove(seq)
        seq.finish = finish

    patch.setattr(Scheduler, "_retire", leaky)


@bug("released too often")
def double_release(patch: pytest.MonkeyPatch) -> None:
    drop = Scheduler._drop

    def twice(self: Scheduler, seq: Seq) -> None:
        self.pool.release(seq.table[:1])
        drop(self, seq)

    patch.setattr(Scheduler, "_drop", twice)


@bug("shows foreign KV")
def publish_before_computed(patch: pytest.MonkeyPatch) -> None:
    grow = Scheduler._grow

    def hasty(self: Scheduler, seq: Seq, stop: int, tasks: dict[int, Task]) -> int:
        granted = grow(self, seq, stop, tasks)
        if self._config.prefix_reuse:
            size = self._config.block_tokens
            keys = prefill_scheduler.extend_keys(seq, granted, size, self.prefill._model)
            for i in range(granted // size):
                self.pool.publish(seq.table[i], keys[i])
        return granted

    patch.setattr(Scheduler, "_grow", hasty)


@bug("shows foreign KV|not the longest known prefix|published what is not computed")
def publish_the_half_full_block(patch: pytest.MonkeyPatch) -> None:
    publish = PrefillScheduler.publish

    def rounded_up(self: PrefillScheduler, seq: Seq, computed: int) -> None:
        size = self._config.block_tokens
        publish(self, seq, min(-(-computed // size) * size, len(seq.tokens) // size * size))

    patch.setattr(PrefillScheduler, "publish", rounded_up)


@bug("shows foreign KV")
def keys_without_namespace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_keys, "root_key", lambda model, namespace: root_key(model, ""))


@bug("shows foreign KV")
def keys_without_parent(patch: pytest.MonkeyPatch) -> None:
    block_key = cache_keys.block_key

    def same_tokens_anywhere(parent: bytes, tokens: list[int]) -> bytes:
        return block_key(b"", tokens)

    patch.setattr(cache_keys, "block_key", same_tokens_anywhere)


@bug("shows foreign KV|not the longest known prefix")
def evicted_block_keeps_its_name(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: BlockPool) -> int:
        block, _ = self._idle.popitem(last=False)
        return block

    patch.setattr(BlockPool, "_forget_oldest", forgetful)


@bug("0 refs, 1 owners|while somebody holds it")
def found_blocks_not_acquired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "acquire", lambda self, blocks: None)


@bug("admitted without work")
def found_idle_blocks_counted_as_extra_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "num_idle", lambda self, blocks: 0)


@bug("nothing left to compute|admitted without work")
def a_full_hit_computes_nothing(patch: pytest.MonkeyPatch) -> None:
    admit = PrefillScheduler._admit

    def complete(self: PrefillScheduler, seq: Seq) -> bool:
        admitted = admit(self, seq)
        found = self._pool.match(seq.keys)
        if admitted and len(found) * self._config.block_tokens == len(seq.tokens):
            self._pool.acquire(found[len(seq.table) :])
            seq.table[:] = found
            seq.num_computed = len(seq.tokens)
        return admitted

    patch.setattr(PrefillScheduler, "_admit", complete)


@bug("the known prefix|longest known prefix|although it fits|published what is not computed")
def published_count_survives_a_preemption(patch: pytest.MonkeyPatch) -> None:
    drop = Scheduler._drop

    def forgetful(self: Scheduler, seq: Seq) -> None:
        num_published = seq.num_published
        drop(self, seq)
        seq.num_published = num_published

    patch.setattr(Scheduler, "_drop", forgetful)


@bug("no block for a row")
def blocks_for_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    grow = Scheduler._grow
    patch.setattr(Scheduler, "_grow", lambda self, seq, stop, tasks: grow(self, seq, stop - 1, tasks) + 1)


@pytest.mark.parametrize("name", bug.plants)
def test_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.expect_caught(name, monkeypatch)
