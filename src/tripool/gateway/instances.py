"""Instances of several ranks for operators: expert maps, loads and replicas, as JSON and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from tripool.control.instance import InstanceStatus

_GAUGES = {
    "expert_map_epoch": "Epoch of the expert map; it rises with every rank that comes or goes.",
    "expert_replicas_max": "Most replicas of one expert.",
    "expert_copies": "Replicas copied to follow the load since the start.",
    "expert_imbalance_ratio": "Rows of the busiest rank over the mean, in the worst layer.",
}
_RANK_GAUGES = {
    "rank_present": "1 while the rank is in the expert map.",
    "rank_experts": "Replicas of experts that the rank holds, in all layers.",
    "rank_routed_rows": "Rows routed so far to the experts that the rank now holds.",
}


class Instances:
    """Those of one run, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> list[dict[str, Any]]:
        """As `tripool status` shows them."""
        return [asdict(instance) for instance in self._read()]

    def families(self, of: Callable[[], set[str]], labels: dict[str, str]) -> Iterator[Metric]:
        """Metrics of the instances that `of` names."""
        names = of()
        found = [instance for instance in self._read() if instance.name in names] if names else []
        if not found:
            return
        gauges, ranked = (
            {name: GaugeMetricFamily(f"tripool_{name}", about, labels=[*labels, *more]) for name, about in all_.items()}
            for all_, more in ((_GAUGES, ("instance",)), (_RANK_GAUGES, ("instance", "rank")))
        )
        for instance in found:
            at = [*labels.values(), instance.name]
            values = (instance.epoch, instance.replicas, instance.copies, instance.imbalance)
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric(at, value)
            for number, rank in enumerate(instance.ranks):
                for gauge, value in zip(ranked.values(), (rank.present, rank.experts, rank.rows), strict=True):
                    gauge.add_metric([*at, str(number)], value)
        yield from (*gauges.values(), *ranked.values())

    def _read(self) -> list[InstanceStatus]:
        from tripool.control.instance import read_instances, slabs_file  # here: most servers need no arrays

        return list(read_instances(self._folder)) if any(self._folder.glob(slabs_file(self._folder, "*").name)) else []
