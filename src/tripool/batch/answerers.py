"""Who answers the rows of a table: a model in this process, or the workers behind a server's URL.

An answerer keeps up to `at_once` requests under way. `submit` begins one, `wait` returns those that have ended, one
or more. What is wrong with a row comes back as its reply; what is wrong with the model or the server is raised, and
ends the run, which can be resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from tripool.batch.job import Asked, Reply, TableJob
from tripool.batch.types import FIRST_REST_S, MAX_REST_S, MAX_TRIES, is_passing, is_retried
from tripool.bench.endpoint import PATHS, find_model
from tripool.bench.wire import Address, CannotConnect, ExchangeFailed, HttpClient
from tripool.config import EngineConfig
from tripool.core import SamplingParams
from tripool.engine_protocol import StepEngine
from tripool.errors import EngineStopped, InvalidRequest, RequestFailed, TripoolError
from tripool.llm import LLM

_FATAL = frozenset({401, 403, 404, 405})
"""The server, its path, its key or its model is not as the run needs it."""
_QUEUED = 16
"""Requests beyond those that an engine computes at once: their prompts are there when a slot is free."""
_ANSWER_S = 3600.0
_PATIENCE_S = 600.0
"""Without a single answer for so long, a server is given up."""


class Answerer(Protocol):
    at_once: int

    def submit(self, asked: Asked) -> None: ...

    def wait(self) -> list[Reply]: ...

    def close(self) -> None: ...


class Model(Protocol):
    """Which model answers, and where."""

    @property
    def name(self) -> str:
        """For the manifest: the same name, the same answers."""

    def open(self, job: TableJob) -> Answerer: ...


class LocalModel:
    """A model in this process: a name or path, loaded when it is opened, or an `LLM` that exists."""

    def __init__(
        self,
        model: str | LLM,
        engine: EngineConfig | None = None,
        load: Callable[[str, EngineConfig], StepEngine] | None = None,
    ) -> None:
        self._model, self._engine, self._load = model, engine or EngineConfig(), load
        self.name = model if isinstance(model, str) else model.name

    def open(self, job: TableJob) -> LocalAnswerer:
        at_once = self._engine.max_running + _QUEUED
        if not isinstance(self._model, str):
            return LocalAnswerer(self._model, job, at_once=at_once)
        if self._load is not None:
            engine = self._load(self._model, self._engine)
        else:
            from tripool.engine.load import load_engine  # here: torch takes seconds to import

            engine = load_engine(self._model, self._engine)
        return LocalAnswerer(LLM(engine), job, at_once=at_once, owns=True)


class ServedModel:
    """A model of a running server. `name`: the first that it lists, when not given."""

    def __init__(self, url: str, name: str | None = None, *, api_key: str | None = None, at_once: int = 64) -> None:
        self._url, self._api_key, self._at_once = url, api_key, at_once
        self._address = Address.parse(url)
        with asyncio.Runner() as runner:
            self.name = runner.run(self._find(name))

    async def _find(self, name: str | None) -> str:
        client = HttpClient(self._address, api_key=self._api_key)
        try:
            return await find_model(client, self._address, name)
        finally:
            client.close()

    def open(self, job: TableJob) -> ServedAnswerer:
        client = HttpClient(self._address, api_key=self._api_key)
        return ServedAnswerer(client, self._address, self.name, job, at_once=self._at_once)


class LocalAnswerer:
    """A model in this process. Prompts are computed in the order in which they come."""

    def __init__(self, llm: LLM, job: TableJob, *, at_once: int, owns: bool = False) -> None:
        self.at_once = at_once
        self._llm, self._job, self._owns = llm, job, owns
        self._refused: list[Reply] = []

    def submit(self, asked: Asked) -> None:
        params, id = self._job.params(asked.seed), f"row {asked.id}"
        try:
            if self._job.complete:
                request = self._llm.request(asked.text, params, id=id)
            else:
                request = self._llm.chat_request(_messages(asked), params, id=id)
            self._llm.begin(request)
        except TripoolError as error:
            if isinstance(error, EngineStopped) or _is_the_jobs(self._job, getattr(error, "param", None)):
                raise
            self._refused.append(Reply(asked.id, wrong=str(error), code=error.code))

    def wait(self) -> list[Reply]:
        refused, self._refused = self._refused, []
        if refused:
            return refused
        replies = []
        for id, ended in self._llm.finished().items():
            number = int(id.removeprefix("row "))
            if isinstance(ended, RequestFailed):
                replies.append(Reply(number, wrong="it failed inside the engine", code=ended.code))
            else:
                replies.append(Reply(number, ended.text, cut_off=ended.finish_reason == "length"))
        return replies

    def close(self) -> None:
        if self._owns:
            self._llm.close()


class ServedAnswerer:
    """Every worker of a deployment, through the OpenAI API of its gateway, which places each request."""

    def __init__(
        self, client: HttpClient, address: Address, name: str, job: TableJob, *, at_once: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.at_once, self._job, self._clock = at_once, job, clock
        self._client, self._address, self._name = client, address, name
        self._runner = asyncio.Runner()
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._last_s = clock()
        self._path = PATHS["completions" if job.complete else "chat"]
        self._common = _options(job)

    def submit(self, asked: Asked) -> None:
        self._tasks.add(self._runner.get_loop().create_task(self._answer(asked)))

    def wait(self) -> list[Reply]:
        done, self._tasks = self._runner.run(self._first())
        self._last_s = self._clock()
        failed = [error for task in done if (error := task.exception()) is not None]
        if failed:
            raise failed[0]
        return [task.result() for task in done]

    def close(self) -> None:
        self._runner.run(self._cancelled())
        self._client.close()
        self._runner.close()

    async def _cancelled(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _first(self) -> tuple[set[asyncio.Task[Reply]], set[asyncio.Task[Reply]]]:
        return await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, asked: Asked) -> Reply:
        body: dict[str, Any] = {"model": self._name, "seed": asked.seed, **self._common}
        body |= {"prompt": asked.text} if self._job.complete else {"messages": _messages(asked)}
        encoded = msgspec.json.encode(body)
        rest_s, tries, began_s = FIRST_REST_S, 0, self._clock()
        while True:
            reply = await self._try(asked, encoded)
            if isinstance(reply, Reply):
                return reply
            status, code, why = reply
            tries += status != 0 and not is_passing(status, code)
            if (status != 0 and not is_retried(status)) or tries >= MAX_TRIES:
                return Reply(asked.id, wrong=why, code=code or f"status_{status}")
            if self._clock() - max(self._last_s, began_s) > _PATIENCE_S:
                raise CannotConnect(f"{self._address} gives no answer: {why}", hint="run it again to go on")
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, MAX_REST_S)

    async def _try(self, asked: Asked, body: bytes) -> Reply | tuple[int, str, str]:
        """Or status, code and what is wrong. Status 0: there was no answer."""
        parts: list[bytes] = []
        try:
            status = await self._client.exchange(
                "POST", self._path, body, lambda _, data, __: parts.append(data), timeout_s=_ANSWER_S
            )
        except ExchangeFailed as failure:
            return 0, "", f"{failure.kind}: {failure.detail}"
        try:
            found: Any = msgspec.json.decode(b"".join(parts))
        except msgspec.MsgspecError:
            found = None
        if status != 200:
            return status, *self._refusal(status, found)
        try:
            choice = found["choices"][0]
            text = choice["text"] if self._job.complete else choice["message"]["content"]
            return Reply(asked.id, text or "", cut_off=choice["finish_reason"] == "length")
        except (TypeError, LookupError):
            return 502, "", "the server's answer is not OpenAI's"

    def _refusal(self, status: int, found: Any) -> tuple[str, str]:
        """Code and reason."""
        error = found.get("error") if isinstance(found, dict) else None
        error = error if isinstance(error, dict) else {}
        code, given = error.get("code"), error.get("message")
        why = str(given) if given else f"the server answers {status}"
        if status in _FATAL or _is_the_jobs(self._job, error.get("param")):
            raise InvalidRequest(
                f"{self._address}{self._path} answers {status}: {why}", hint="every row would be refused"
            )
        return code if isinstance(code, str) else "", why


def _messages(asked: Asked) -> list[dict[str, str]]:
    system = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    return [*system, {"role": "user", "content": asked.text}]


def _is_the_jobs(job: TableJob, param: Any) -> bool:
    """Whether a refusal is about what all rows have in common. `max_tokens` may be too large for one row only."""
    return param in ("schema", "response_format") or (param != "max_tokens" and param in job.sampling)


def _options(job: TableJob) -> Mapping[str, Any]:
    """Those of the job as fields of a body. The server's defaults are not ours: the temperature is always sent."""
    options = dict(job.sampling) | {"temperature": SamplingParams.from_options(job.sampling).temperature}
    if job.schema is not None:
        schema = {"name": "row", "schema": job.schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return options
