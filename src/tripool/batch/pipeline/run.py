"""Runs a pipeline like a build: each stage whose artefact is there and whole is passed over, the others are made.

train or import -> quantise -> evaluate -> gate -> register -> canary -> publish
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import tripool
from tripool.batch.pipeline.artefacts import Artefact, Artefacts, Made, key_of
from tripool.batch.pipeline.config import Import, Pipeline, PipelineError
from tripool.batch.pipeline.stages import (
    Model,
    Stage,
    Tell,
    eval_stage,
    import_stage,
    quantize_stage,
    train_stage,
    trained,
)
from tripool.checkpoints import Registry, RegistryError
from tripool.checkpoints.content import content_hash, json_hash, write_durably
from tripool.checkpoints.json_files import read_object
from tripool.errors import TripoolError

_POLL_S = 1.0
_GONE_S = 120.0
"""How long a server may not answer during a canary: it may be restarted meanwhile."""
_ENDED = ("published", "rolled_back")


class GateFailed(TripoolError, status=409, code="gate_failed"):
    """A figure misses its bar: nothing is registered or published."""


class CanaryFailed(TripoolError, status=409, code="canary_failed"):
    """The canary was rolled back: nothing is published."""


class CanaryServer(Protocol):
    """The running server's side of `POST` and `GET /v1/canary/{name}`."""

    def start(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Begins it, or returns the state of the one that has this `id`."""

    def state(self, name: str) -> dict[str, Any] | None:
        """None: the server does not answer now."""


@dataclass(frozen=True, slots=True)
class Row:
    """A stage, for a person."""

    stage: str
    state: Literal["done", "made", "begun", "to do", "passed", "missed"]
    artefact: Artefact | None = None
    note: str = ""


@dataclass(slots=True)
class Outcome:
    rows: list[Row] = field(default_factory=list)
    version: str = ""
    """Registered as."""
    published: str = ""
    """What the pointer shows now."""
    is_running: bool = False
    """Whether another process is at it."""


class ToDo(Exception):
    """Of a plan: what follows depends on a stage that was not run."""


class Run:
    """`server` is made from the canary's address; None: only plan, make nothing."""

    def __init__(
        self, pipeline: Pipeline, tell: Tell, server: Callable[[str], CanaryServer] | None, *,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._pipeline, self._tell, self._server = pipeline, tell, server
        self._clock, self._sleep = clock, sleep
        self._artefacts, self._registry = Artefacts(pipeline.folder), Registry(pipeline.registry)
        self._outcome = Outcome()
        self._made: list[Artefact] = []

    def run(self) -> Outcome:
        with self._artefacts.locked():
            self._stages()
        return self._shown()

    def plan(self) -> Outcome:
        """What is there, and what would be made."""
        assert self._server is None
        self._outcome.is_running = self._artefacts.is_running
        try:
            self._stages()
        except ToDo:
            known = {row.stage for row in self._outcome.rows}
            rest = ("quantize", "eval", "gate", "register", "canary", "publish")
            left = {"quantize": self._pipeline.quantize, "canary": self._pipeline.canary}
            todo = [name for name in rest if name not in known and left.get(name, True)]
            self._outcome.rows += [Row(name, "to do") for name in todo]
        return self._shown()

    def _shown(self) -> Outcome:
        name = self._pipeline.name
        published = self._registry.published(name)
        self._outcome.published = f"{name}@{published}" if published is not None else ""
        return self._outcome

    def _stages(self) -> None:
        pipeline = self._pipeline
        source = pipeline.source
        if isinstance(source, Import):
            stage, before = import_stage(pipeline.model(source.model))
            self._stage(stage)
        else:
            before = trained(self._stage(train_stage(pipeline, source, self._tell)))
        model = before
        if pipeline.quantize is not None:
            model = trained(self._stage(quantize_stage(pipeline, before, self._tell)))
        evaluated = self._stage(eval_stage(pipeline, model, before, self._tell))
        figures = {name: value for artefact in self._made for name, value in artefact.figures.items()}
        self._gate(figures)
        registered = self._stage(self._register_stage(model, evaluated, figures), self._is_registered)
        said = read_object(registered.path / registered.output)
        number = int(said["version"])
        self._outcome.version = f"{pipeline.name}@{number}"
        inputs = {"registered": registered.content, "gate": json_hash(asdict(pipeline.gate))}
        if pipeline.canary is not None:
            inputs["canary"] = self._stage(self._canary_stage(number, str(said["content"]), registered)).content
        self._stage(self._publish_stage(number, inputs))

    def _stage(self, stage: Stage, is_valid: Callable[[Artefact], bool] = lambda artefact: True) -> Artefact:
        key = key_of(stage.name, stage.settings, stage.inputs)
        found = self._artefacts.find(stage.name, key)
        if found is not None and is_valid(found):
            self._outcome.rows.append(Row(stage.name, "done", found))
            self._tell(f"{stage.name}: done before, {found.content[:12]}")
        elif self._server is None:
            begun = self._artefacts.is_begun(stage.name, key)
            self._outcome.rows.append(Row(stage.name, "begun" if begun else "to do"))
            raise ToDo
        else:
            begun = self._artefacts.is_begun(stage.name, key)
            self._tell(f"{stage.name}: {'goes on' if begun else 'begins'}")
            found = self._artefacts.make(stage.name, stage.settings, stage.inputs, stage.run)
            self._outcome.rows.append(Row(stage.name, "made", found))
            self._tell(f"{stage.name}: made in {found.seconds:.1f} s, {found.content[:12]}")
        self._made.append(found)
        return found

    # ---- gate, register -------------------------------------------------------------------------------------------

    def _gate(self, figures: Mapping[str, float]) -> None:
        missed = self._pipeline.gate.missed(figures)
        if missed:
            self._outcome.rows.append(Row("gate", "missed", note="; ".join(missed)))
            if self._server is None:
                raise ToDo
            hint = "nothing was registered or published; another model or another bar runs the rest"
            raise GateFailed(f"the gate of '{self._pipeline.name}': {'; '.join(missed)}", hint=hint)
        bars = len(self._pipeline.gate.min) + len(self._pipeline.gate.max)
        note = f"{bars} bar{'s' if bars > 1 else ''} kept"
        self._outcome.rows.append(Row("gate", "passed", note=note))
        self._tell(f"gate: {note}")

    def _register_stage(self, model: Model, evaluated: Artefact, figures: Mapping[str, float]) -> Stage:
        name, inputs = self._pipeline.name, {"model": model.content, "figures": evaluated.content}
        settings = {"name": name, "registry": str(self._registry.folder)}
        lineage = self._lineage(figures)

        def run(folder: Path) -> Made:
            key = key_of("register", settings, inputs)
            version = self._registry.add(name, Path(model.path), lineage, key=key, expected=model.content)
            write_durably(folder / "version.json", {"version": version.number, "content": version.content})
            return Made(folder / "version.json")

        return Stage("register", settings, inputs, run)

    def _is_registered(self, artefact: Artefact) -> bool:
        """The registry may have been removed since."""
        said = read_object(artefact.path / artefact.output)
        try:
            version = self._registry.version(self._pipeline.name, int(said["version"]))
        except RegistryError:
            return False
        return content_hash(version.path) == str(said["content"])

    def _lineage(self, figures: Mapping[str, float]) -> dict[str, Any]:
        from tripool.hosts.models import code_identity  # what decides the bits of an answer

        return {
            "pipeline": dict(self._pipeline.tree),
            "stages": [artefact.lineage() for artefact in self._made],
            "figures": dict(figures),
            "gate": asdict(self._pipeline.gate),
            "tripool": tripool.__version__,
            "code": code_identity(),
            "published_then": self._registry.published(self._pipeline.name),
        }

    # ---- canary, publish ------------------------------------------------------------------------------------------

    def _canary_stage(self, number: int, content: str, registered: Artefact) -> Stage:
        plan, name = self._pipeline.canary, self._pipeline.name
        assert plan is not None
        settings, inputs = asdict(plan), {"registered": registered.content}
        key = key_of("canary", settings, inputs)

        def run(folder: Path) -> Made:
            attempts = folder / "attempts.json"
            attempt = int(read_object(attempts)["failed"]) if attempts.exists() else 0
            body = plan.asked() | {"version": number, "content": content, "id": f"{key}-{attempt}"}
            state = self._watch(name, plan.url, body)
            if state["state"] != "published":
                write_durably(attempts, {"failed": attempt + 1})  # the next run begins another canary
                hint = f"{name}@{number} stays registered, and is not published"
                raise CanaryFailed(f"the canary of {name}@{number} was rolled back: {state['reason']}", hint=hint)
            write_durably(folder / "canary.json", state)
            return Made(folder / "canary.json")

        return Stage("canary", settings, inputs, run)

    def _watch(self, name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """The server decides by itself. Where it was restarted, the canary begins again under the same id."""
        assert self._server is not None
        server = self._server(url)
        state: dict[str, Any] | None = server.start(name, body)
        heard_s, shown = self._clock(), ""
        while state is None or state["state"] not in _ENDED:
            self._sleep(_POLL_S)
            state = server.state(name)
            now_s = self._clock()
            if state is None:
                if now_s - heard_s > _GONE_S:
                    hint = "start it and run the pipeline again: it goes on"
                    raise PipelineError(f"{url} has not answered for {_GONE_S:.0f} s", hint=hint)
                continue
            heard_s = now_s
            if state.get("id") != body["id"]:
                self._tell("canary: the server was restarted, or another canary was begun; once more")
                state = server.start(name, body)
            line = f"canary: {state['state']}, {state.get('summary', '')}"
            if line != shown:
                shown = line
                self._tell(line)
        return state

    def _publish_stage(self, number: int, inputs: dict[str, str]) -> Stage:
        name = self._pipeline.name

        def run(folder: Path) -> Made:
            if self._pipeline.canary is None:  # else the server has done it, and an operator may have undone it since
                self._registry.publish(name, number)
            write_durably(folder / "published.json", {"version": number})
            return Made(folder / "published.json")

        return Stage("publish", {"name": name, "registry": str(self._registry.folder)}, inputs, run)
