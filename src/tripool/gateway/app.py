"""The HTTP application: the routes that generate, those of other modules, and the error responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tripool import __version__
from tripool.answer import Answer
from tripool.config import GatewayConfig
from tripool.core import Request
from tripool.errors import ContextOverflow, InvalidRequest, ModelNotFound, TripoolError
from tripool.gateway.admin import InFlight, admin_routes
from tripool.gateway.auth import Access, Guard, caller_of
from tripool.gateway.backend import Backend
from tripool.gateway.batches import BatchService, batch_routes
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs
from tripool.gateway.connection_limits import ConnectionQuota
from tripool.gateway.cors import Cors, checked_origins
from tripool.gateway.dialects import formatter_of
from tripool.gateway.event_ids import event_ids_of
from tripool.gateway.fair_pool import FairPool
from tripool.gateway.group import Group
from tripool.gateway.grpc.routes import grpc_routes
from tripool.gateway.host_check import HostCheck
from tripool.gateway.idempotency import LAST_EVENT, Keeper, read_key
from tripool.gateway.job import Api, Job, check_echoes
from tripool.gateway.kept_streams import LocalKeeper
from tripool.gateway.model_routes import model_routes
from tripool.gateway.models import Models, Served
from tripool.gateway.ollama import parse as ollama
from tripool.gateway.ollama.respond import loaded
from tripool.gateway.ollama.routes import ollama_routes
from tripool.gateway.options import ANTHROPIC, CHAT, COMPLETION, Fields
from tripool.gateway.parse import Sender, header_id
from tripool.gateway.record import Journal, Record
from tripool.gateway.refusals import dialect_of, error_body, error_headers, error_shape
from tripool.gateway.remote_backend import RemoteBackend
from tripool.gateway.request_log import RequestLog, log_connection, note_error, note_record, request_id_of
from tripool.gateway.respond import EVENT_STREAM, Formatter
from tripool.gateway.responses.fields import RESPONSES
from tripool.gateway.responses.open import opened
from tripool.gateway.responses.recent import RecentItems
from tripool.gateway.responses.routes import response_routes
from tripool.gateway.responses.shared import SharedResponses
from tripool.gateway.responses.store import ResponseStore
from tripool.gateway.schema_check import SchemaCheck
from tripool.gateway.slo import read_header_slo
from tripool.gateway.stream import AnswerResponse
from tripool.gateway.tokens import token_routes
from tripool.gateway.versions import canary_routes
from tripool.grammar import Trial
from tripool.router.kept_types import Count, keyed_request, name_of
from tripool.tenants import Caller, Tenant
from tripool.text import NotQuick, StopFinder

_SHORT_BYTES = 4096
"""Bodies up to this size are parsed on the event loop, in under a millisecond unless the chat template is unusually
slow: handing them to another thread would take longer."""
_READING_THREADS = 2
_MAX_READING_BYTES = 64 * 2**20
"""Total size of bodies that wait to be parsed."""
_TRIALS = 2
_MAX_TRIALS_WAITING = 64


def create_models_app(
    models: Models,
    config: GatewayConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    access: Access | None = None,
    group: Group | None = None,
) -> FastAPI:
    """OpenAI's API, Anthropic's and the operator's; a request names its model. Without `access` no key is asked for.
    `group`: of a gateway that may be one of several."""
    app = FastAPI(title="Tripool", version=__version__)
    group = group or Group()
    peers = group.peers
    in_flight, journal = InFlight(peers), Journal()
    bodies = Bodies(config.max_body_bytes)
    reading = FairPool("reading", num_threads=_READING_THREADS, max_waiting=_MAX_READING_BYTES)

    def connection_ended(code: str) -> None:
        models.default.metrics.connection_ended(code)
        log_connection(code)

    app.state.on_connection_ended, app.state.max_body_bytes = connection_ended, config.max_body_bytes
    store_bytes = config.response_store_bytes
    store = ResponseStore(store_bytes or 0, RecentItems(clock) if store_bytes is None else None)
    shared = SharedResponses(store, peers)
    answering = Answering(models, in_flight, journal, bodies, clock, access, reading, shared, group.keeper)
    app.state.on_count = answering.counted
    for route in _GENERATION:
        _add_generation(app, answering, *route)  # first: routes are tried in their order, and most requests are these
    app.include_router(admin_routes(models, in_flight, journal, peers, stall_s=config.stall_s))
    app.include_router(token_routes(models, bodies, reading))
    app.include_router(model_routes(models, bodies))
    app.include_router(canary_routes(models, bodies))
    app.include_router(ollama_routes(models, bodies))
    app.include_router(response_routes(models, bodies, reading, shared))
    app.state.batches = BatchService(config, answering.answer_line, models, in_flight, access, group.batches)
    app.include_router(batch_routes(app.state.batches, bodies))
    app.add_middleware(ConnectionQuota, on_refused=models.default.metrics.refused)
    guarded, origins = access is not None, checked_origins(config.cors_origins)
    app.add_middleware(HostCheck, guarded=guarded, on_refused=models.default.metrics.refused, origins=origins)
    if access is not None:
        app.add_middleware(Guard, access=access, on_refused=models.default.metrics.refused)
    if origins:
        app.add_middleware(Cors, origins=origins, guarded=guarded)
    app.add_middleware(RequestLog)  # the last one added is the outermost
    app.include_router(grpc_routes(partial(answering.answer, api="grpc")))
    _shape_errors(app, models)
    return app


_GENERATION: Sequence[tuple[str, str, Api, Fields]] = (
    ("chat_completions", "/v1/chat/completions", "chat", CHAT),
    ("completions", "/v1/completions", "completion", COMPLETION),
    ("messages", "/v1/messages", "messages", ANTHROPIC),
    ("responses", "/v1/responses", "responses", RESPONSES),
    ("ollama_chat", "/api/chat", "ollama_chat", ollama.CHAT),
    ("ollama_generate", "/api/generate", "ollama_generate", ollama.GENERATE),
)
"""Name, path, API and fields of the routes that generate."""


def _add_generation(app: FastAPI, answering: Answering, name: str, path: str, api: Api, fields: Fields) -> None:
    @app.post(path, name=name, openapi_extra=body_docs(fields.schema()))
    async def generate(http: HttpRequest) -> Response:
        return await answering.answer(http, api)


class Answering:
    """Handles a generation request: from the HTTP request to the response that runs it."""

    def __init__(
        self,
        models: Models,
        in_flight: InFlight,
        journal: Journal,
        bodies: Bodies,
        clock: Callable[[], float],
        access: Access | None,
        reading: FairPool,
        shared: SharedResponses,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper: Keeper = keeper or LocalKeeper(clock, self.counted)
        self._models, self._in_flight, self._journal, self._bodies = models, in_flight, journal, bodies
        self._shared, self._store = shared, shared.store
        self._clock, self._access, self._reading = clock, access, reading
        """For bodies that take long to encode: large ones, and those with a slow chat template."""
        self._check = SchemaCheck()
        self._trial, self._trying = Trial(), FairPool("trials", num_threads=_TRIALS, max_waiting=_MAX_TRIALS_WAITING)

    async def answer(self, http: HttpRequest, api: Api) -> Response:
        received_s = self._clock()
        self._in_flight.check()
        with self._in_flight.request():
            served, job = await self._read(http, api)
        return self._response(http, served, job, received_s, http.headers.get(LAST_EVENT, ""))

    async def answer_line(self, http: HttpRequest, api: Api, raw: bytes, request_id: str) -> Response:
        """A line of a batch, in the background: no rate limit applies."""
        received_s, tenant = self._clock(), caller_of(http).tenant
        sender = Sender(tenant, request_id, {}, self._store.history(tenant.name), background=True)
        served, job = await self._prepared(raw, api, sender)
        if job.stream:
            raise InvalidRequest("a request of a batch cannot be streamed", hint="leave out 'stream'", param="stream")
        return self._response(http, served, job, received_s)

    def _response(
        self, http: HttpRequest, served: Served, job: Job, received_s: float, last_event: str = ""
    ) -> Response:
        created_s = int(time.time()) if job.keyed is None else job.keyed.created_s
        tokenizer = served.tokenizer
        finder = StopFinder(job.requests[0].params.stop)  # shared by all prompts
        answers = [Answer(request, tokenizer, finder) for request in job.requests]
        formatter = formatter_of(job, tokenizer, answers, self._store, model=served.name, created_s=created_s)
        ids = event_ids_of(job, last_event, in_events=formatter.stream_type == EVENT_STREAM)
        backend, finished = served.backend, None
        if job.keyed is not None:
            kept = self._keeper.backend(backend, served.name, job.keyed, caller_of(http).tenant)
            backend, finished = kept, kept.finished
        metrics = served.metrics
        on_gaps = metrics.gaps if not job.requests[0].slo.background else lambda gaps_s: None
        record = Record(job, self._clock, received_s=received_s, created_s=created_s, on_gaps=on_gaps)
        if isinstance(served.backend, RemoteBackend):
            record.ask = served.backend.explained
        self._journal.keep(record)
        note_record(http.scope, record, served.name)
        self._models.begun(served, job.id)
        return AnswerResponse(
            job,
            backend,
            answers,
            formatter,
            record,
            clock=self._clock,
            check=self._check,
            ids=ids,
            finished=finished,
            in_flight=partial(self._answering, served, job, formatter, backend),
            on_end=partial(self._ended, caller_of(http), served),
        )

    def _ended(self, caller: Caller, served: Served, record: Record) -> None:
        self._models.ended(served, record)
        if self._access is not None:
            self._access.ended(record, caller, served.name)

    def counted(self, count: Count, done: Callable[[], object] = lambda: None) -> None:
        """Usage of an answer under an idempotency key. `done`: see `Access.counted`."""
        with suppress(ModelNotFound):  # it was unloaded meanwhile
            self._models.find(count.model).metrics.counted(count.usages)
        if self._access is not None:
            self._access.counted(count, done)
        else:
            done()

    async def _read(self, http: HttpRequest, api: Api) -> tuple[Served, Job]:
        caller, header_slo, key = caller_of(http), read_header_slo(http.headers), read_key(http.headers)
        tenant = caller.tenant
        repeats = key is not None and await self._keeper.repeats(tenant, name_of(tenant, key))
        if not repeats:
            await self._models.enter(tenant)
        raw = await self._bodies.read(http)
        if not repeats:
            self._models.read(tenant, len(raw))
        keyed, claim = None, None
        if key is not None:
            keyed = keyed_request(caller, key, api, raw, int(time.time()))
            claim = await self._keeper.claim(keyed, tenant)
            keyed = replace(keyed, created_s=claim.created_s)
        sender = Sender(
            tenant,
            header_id(http.headers.get("x-request-id")),
            header_slo,
            self._store.history(tenant.name),
            keyed=keyed,
            model=claim.model if claim is not None else "",
        )
        return await self._prepared(raw, api, sender)

    async def _prepared(self, raw: bytes, api: Api, sender: Sender) -> tuple[Served, Job]:
        tenant, meant = sender.tenant, list[Served]()
        try:
            parse = partial(self._parse, raw, api, sender, meant)
            served, job = await self._shared.reading(tenant.name, lambda: self._parsed(tenant, len(raw), parse))
            check_echoes(job)
            try:
                served.check(job.requests)
            except ContextOverflow as error:
                error.param = {"completion": "prompt", "grpc": "input"}.get(api, "messages")
                raise
            return served, await self._tried(job, tenant)
        except TripoolError:
            if meant:
                self._models.refused(meant[-1])
            raise

    async def _tried(self, job: Job, tenant: Tenant) -> Job:
        """With a grammar that can be used."""
        looser, request = job.looser, job.requests[0]
        if looser is None:
            return job
        job = replace(job, looser=None)  # it holds the whole body
        try:
            await self._try(request, tenant)
            return job
        except InvalidRequest:
            structure, unenforced = looser()
            if structure == request.params.structure:
                raise
        params = replace(request.params, structure=structure)
        requests = tuple(replace(one, params=params) for one in job.requests)
        await self._try(requests[0], tenant)
        return replace(job, requests=requests, unenforced=unenforced)

    async def _try(self, request: Request, tenant: Tenant) -> None:
        """Compile a grammar in a sandbox before it reaches an engine."""
        structure, namespace = request.params.structure, request.namespace
        if structure is None:
            return
        if self._trial.is_known(structure, namespace):
            self._trial.check(structure, namespace)
        else:
            await self._trying.run(tenant.name, partial(self._trial.check, structure, namespace))

    async def _parsed(
        self, tenant: Tenant, num_bytes: int, parse: Callable[..., tuple[Served, Job]]
    ) -> tuple[Served, Job]:
        if num_bytes <= _SHORT_BYTES:
            with suppress(NotQuick):
                return parse(quick=True)
        return await self._reading.run(tenant.name, parse, size=num_bytes)

    def _parse(
        self, raw: bytes, api: Api, sender: Sender, meant: list[Served], *, quick: bool = False
    ) -> tuple[Served, Job]:
        """`meant` gets the model, also of a request that is refused."""
        if api == "grpc":
            from tripool.gateway.grpc.parse import to_body  # here: its packages may be missing

            raw = to_body(raw)
        served = self._models.find(sender.model) if sender.model else self._models.meant_by(raw, sender.tenant.name)
        meant.append(served)
        parser = served.parser.quick if quick else served.parser
        job: Job = getattr(parser, api)(raw, sender)  # its methods have the names of the APIs
        return served, job

    @contextmanager
    def _answering(self, served: Served, job: Job, formatter: Formatter, backend: Backend) -> Iterator[None]:
        running = opened(job, formatter, self._store, backend.cancel)
        with self._in_flight.request(), served.open.request(), running:
            yield


def _shape_errors(app: FastAPI, models: Models) -> None:
    def shaped(http: HttpRequest, status: int, body: dict[str, Any], headers: Any = None) -> Response:
        request_id = request_id_of(http.scope)
        named = {} if request_id is None else {"x-request-id": request_id}
        return JSONResponse(body, status_code=status, headers={**(headers or {}), **named})

    @app.exception_handler(TripoolError)
    async def refused(http: HttpRequest, error: TripoolError) -> Response:
        models.default.metrics.refused(error.code)
        note_error(http.scope, error.code)
        return shaped(http, error.status, error_shape(error, dialect_of(http.url.path)), error_headers(error))

    @app.exception_handler(ollama.OnlyLoads)
    async def only_loads(http: HttpRequest, asked: ollama.OnlyLoads) -> Response:
        body = loaded(str(asked), int(time.time()), chat=http.url.path == "/api/chat")
        return Response(body, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def wrong_query(http: HttpRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = str(first["loc"][-1])[:100]
        note_error(http.scope, "invalid_request")
        return shaped(http, 400, error_body(400, f"'{param}': {first['msg']}", code="invalid_request", param=param))

    @app.exception_handler(HTTPException)
    async def no_such_route(http: HttpRequest, error: HTTPException) -> Response:
        message, dialect = f"{http.method} {http.url.path}: {error.detail}", dialect_of(http.url.path)
        return shaped(http, error.status_code, error_body(error.status_code, message, dialect=dialect), error.headers)

    @app.exception_handler(Exception)
    async def our_mistake(http: HttpRequest, error: Exception) -> Response:
        # Starlette raises it again after this answer; the log has its type and place, under the request's id.
        message, dialect = "internal server error; see the server's log", dialect_of(http.url.path)
        return shaped(http, 500, error_body(500, message, code=TripoolError.code, dialect=dialect))
