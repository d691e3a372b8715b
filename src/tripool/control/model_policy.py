"""Decides which models are in memory: what to load and what to unload for it. Pure.

| state | meaning | next |
|---|---|---|
| away | not in memory | loading, when wanted and there is room |
| loading | its memory is reserved | ready, or away (with the reason) if loading fails |
| ready | serves requests | leaving, when idle and another model needs the room; draining, on request |
| draining | open answers continue, new ones are refused | leaving after the last; ready if the request is withdrawn |
| leaving | its memory is being freed | away |

A model with an open answer or a waiting request is never unloaded. Wanted models get room in the order in which they
were first wanted. A model that an operator sent away stays away until an operator loads it; one that was unloaded to
make room comes back when it is wanted. The time is an argument; loading itself is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["away", "loading", "ready", "draining", "leaving"]

RETRY_S = 10.0
"""For this long, requests do not retry a model that failed to load; an operator may at any time."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    name: str


Decision = Load | Unload


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a model cannot be loaded now, in bytes."""

    name: str
    needs: int
    budget: int
    in_use: int
    """Bytes of models that serve, load or are requested: they cannot be freed now."""

    @property
    def missing(self) -> int:
        return self.needs + self.in_use - self.budget

    @property
    def for_ever(self) -> bool:
        """Whether it would not fit even alone."""
        return self.needs > self.budget


@dataclass(slots=True)
class ModelStatus:
    needs: int
    """Bytes: an estimate until it is loaded, then the actual size."""
    planned: int
    """The estimate at the last load."""
    state: State = "away"
    open: int = 0
    waiting: int = 0
    used_s: float = float("-inf")
    sent_away: bool = False
    failed_s: float | None = None

    @property
    def in_memory(self) -> bool:
        return self.state != "away"

    @property
    def idle(self) -> bool:
        return self.state == "ready" and not self.open and not self.waiting


class ModelPolicy:
    """`needs`: estimated bytes of each model. `budget`: for all of them together; None: unlimited."""

    def __init__(self, needs: Mapping[str, int], budget: int | None) -> None:
        self._models = {name: ModelStatus(num_bytes, num_bytes) for name, num_bytes in needs.items()}
        self.budget = budget
        self._wanted: dict[str, None] = {}
        """Models that are away and wanted, in order of request."""

    def add(self, name: str, num_bytes: int) -> None:
        assert name not in self._models
        self._models[name] = ModelStatus(num_bytes, num_bytes)

    # ---- facts ------------------------------------------------------------------------------------------------------

    def want(self, name: str, now_s: float, *, by_operator: bool = False) -> None:
        """A request or an operator wants the model; an operator also withdraws an earlier `send_away`."""
        model = self._models[name]
        if by_operator:
            model.sent_away, model.failed_s = False, None
            if model.state == "draining":
                model.state = "ready"
        if model.failed_s is not None and now_s >= model.failed_s + RETRY_S:
            model.failed_s = None
        model.used_s = max(model.used_s, now_s)
        if model.state in ("away", "leaving") and not model.sent_away and model.failed_s is None:
            self._wanted.setdefault(name)

    def unwant(self, name: str) -> None:
        """No request waits for it any more."""
        if not self._models[name].waiting:
            self._wanted.pop(name, None)

    def send_away(self, name: str) -> None:
        """An operator unloads the model: it drains, and stays away until an operator wants it."""
        model = self._models[name]
        model.sent_away = True
        self._wanted.pop(name, None)
        if model.state == "ready":
            model.state = "draining"

    def wait(self, name: str, now_s: float) -> None:
        """A request starts waiting for it, until `waited`."""
        self._models[name].waiting += 1
        self.want(name, now_s)

    def waited(self, name: str) -> None:
        model = self._models[name]
        assert model.waiting > 0
        model.waiting -= 1
        self.unwant(name)

    def opened(self, name: str, now_s: float) -> None:
        """An answer starts."""
        model = self._models[name]
        assert model.state == "ready"
        model.open += 1
        model.used_s = max(model.used_s, now_s)

    def closed(self, name: str, now_s: float) -> None:
        model = self._models[name]
        assert model.open > 0
        model.open -= 1
        model.used_s = max(model.used_s, now_s)

    def loaded(self, name: str, num_bytes: int) -> None:
        """`num_bytes`: its actual size."""
        model = self._models[name]
        assert model.state == "loading"
        model.state, model.needs = "draining" if model.sent_away else "ready", num_bytes

    def failed(self, name: str, now_s: float) -> None:
        model = self._models[name]
        assert model.state == "loading"
        model.state, model.failed_s = "away", now_s

    def left(self, name: str) -> None:
        model = self._models[name]
        assert model.state == "leaving"
        model.state = "away"

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """Actions to start now, each returned once; the caller reports `loaded`, `failed` or `left`."""
        decisions: list[Decision] = []
        for name, model in self._models.items():
            if model.state == "draining" and not model.open:
                model.state = "leaving"
                decisions.append(Unload(name))
        for name in list(self._wanted):
            model = self._models[name]
            if model.state == "leaving":
                break  # it must finish unloading first
            if self._free_bytes() >= model.needs:
                del self._wanted[name]
                model.state, model.planned = "loading", model.needs
                decisions.append(Load(name))
                continue
            decisions += self._make_room(model.needs)
            break  # freed memory goes to the first in the queue
        if not self._wanted:
            decisions += self._make_room(0)  # a model may be larger than planned
        return decisions

    def fits_beside(self, name: str) -> bool:
        """Whether it can be loaded without unloading another."""
        return self._free_bytes() >= self._models[name].needs

    def shortage(self, name: str) -> Shortage | None:
        """None if it can be loaded, now or after models in state leaving are gone."""
        model = self._models[name]
        if self.budget is None or model.in_memory:
            return None
        in_use = sum(one.needs for one in self._models.values() if one.state in ("loading", "ready") and not one.idle)
        short = Shortage(name, model.needs, self.budget, in_use)
        return short if short.missing > 0 else None

    def _make_room(self, num_bytes: int) -> list[Decision]:
        """Unload the least recently used idle models, if that suffices together with those leaving; else nothing."""
        if self.budget is None:
            return []
        lacking = num_bytes - self._free_bytes()
        lacking -= sum(one.needs for one in self._models.values() if one.state in ("leaving", "draining"))
        idle = sorted((one.used_s, name) for name, one in self._models.items() if one.idle)
        chosen: list[Decision] = []
        for _, name in idle:
            if lacking <= 0:
                break
            lacking -= self._models[name].needs
            chosen.append(Unload(name))
        if lacking > 0:
            return []
        for decision in chosen:
            self._models[decision.name].state = "leaving"
        return chosen

    def _free_bytes(self) -> float:
        if self.budget is None:
            return float("inf")
        return self.budget - sum(one.needs for one in self._models.values() if one.in_memory)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> ModelStatus:
        return self._models[name]

    @property
    def loaded_bytes(self) -> int:
        return sum(one.needs for one in self._models.values() if one.in_memory)

    def check(self) -> None:
        surprise = 0
        for name, one in self._models.items():
            assert one.open >= 0 and one.waiting >= 0, name
            assert not one.open or one.state in ("ready", "draining"), f"{name} is {one.state} with open answers"
            assert one.state != "ready" or not one.sent_away, f"{name} was sent away and takes requests"
            if one.in_memory:
                surprise += max(0, one.needs - one.planned)
        for name in self._wanted:
            one = self._models[name]
            assert one.state in ("away", "leaving") and not one.sent_away and one.failed_s is None, name
        if self.budget is not None:
            assert self.loaded_bytes <= self.budget + surprise, "more in memory than the budget allows"
