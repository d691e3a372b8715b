"""One trace through a planned deployment: requests in, a table of their outcomes out. Pure.

The same trace, layout and faults give the same bytes, whether quiet decode steps are skipped or taken one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from tripool.bench.trace import TraceRequest
from tripool.core import Request, SamplingParams, Slo
from tripool.simulate.request_table import Arrival
from tripool.simulate.supernode.faults import Fault, Faults
from tripool.simulate.supernode.fleet import ModelledFleet
from tripool.simulate.supernode.layout import Layout
from tripool.simulate.supernode.pool import chain_keys
from tripool.simulate.timeline import Timeline
from tripool.simulate.world import World
from tripool.tenants import Tenant

_ZEROS = (0,) * 2**18


class TraceRun:
    def __init__(
        self,
        layout: Layout,
        requests: Iterable[TraceRequest],
        faults: Sequence[Fault] = (),
        *,
        slice_s: float = 30.0,
        most_blocks: int | None = None,
    ) -> None:
        """`most_blocks`: of all prompts together, where that is known; a cache member need not be larger."""
        self.layout, self.timeline = layout, Timeline()
        self.names_blocks = False
        """Whether the trace says which prompts share a prefix."""
        slots = min(layout.member_slots, most_blocks or layout.member_slots)
        self.fleet = ModelledFleet(layout, self.timeline, slice_s, slots)
        self.faults = Faults(self.fleet, faults)
        self.world = World(
            self.timeline, self.fleet, self._arrivals(requests), admission=layout.admission, faults=self.faults,
            observer=self.faults,
        )  # fmt: skip
        self.table, self.slices, self.run = self.world.table, self.fleet.slices, self.world.run

    def _arrivals(self, requests: Iterable[TraceRequest]) -> Iterator[Arrival]:
        tpot_ms = self.layout.tpot_s * 1e3 if self.layout.promised else None
        block_tokens = self.layout.prefill.config.block_tokens

        @cache
        def tenant_of(name: str) -> tuple[Tenant, Slo]:
            return Tenant(name=name, namespace=name), Slo(tpot_ms=tpot_ms, tenant=name)

        @cache
        def params_of(output_tokens: int) -> SamplingParams:
            return SamplingParams(max_tokens=output_tokens, ignore_eos=True)

        for serial, ask in enumerate(requests):
            self.names_blocks = self.names_blocks or bool(ask.block_ids)
            tenant, slo = tenant_of(ask.tenant)
            prompt = _ZEROS[: ask.input_tokens] if ask.input_tokens <= len(_ZEROS) else (0,) * ask.input_tokens
            request = Request(
                id=str(serial), prompt_ids=prompt, params=params_of(ask.output_tokens), seed=serial,
                namespace=tenant.namespace, slo=slo,
            )  # fmt: skip
            keys = chain_keys(ask, serial, block_tokens, tenant.namespace)
            yield Arrival(ask.arrival_s, request, tenant, keys=keys)
