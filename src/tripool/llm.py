"""The Python API: `LLM("tiny").generate(prompts, params)` runs an engine in the caller's thread.

Not thread-safe; a server uses `EngineThread` instead. Several streams may be open at once, and reading one advances all
of them. Whatever ends a call early (an exception, Ctrl-C, a closed stream) cancels its requests.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, cast

from tripool.answer import Answer, Generation
from tripool.config import Device, EngineConfig, Precision
from tripool.core import Conversation, Request, SamplingParams, TokenEvent
from tripool.engine_protocol import StepEngine
from tripool.errors import InvalidRequest, RequestFailed, TripoolError
from tripool.text import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

OnProgress = Callable[[int, int], None]
"""Called with (answers finished, answers in all)."""


class LLM:
    """A model in this process.

    `model` is a name (`tiny`, `smollm2`), the path of a checkpoint, or an existing engine.
    """

    def __init__(
        self,
        model: str | StepEngine,
        *,
        kv_gb: float | None = None,
        max_running: int = 64,
        mtp: bool = True,
        precision: Precision = "int8",
        threads: int | None = None,
        device: Device = "cpu",
        exact: bool = False,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(model, str):
            # Imported here, so that `import tripool` and the command line's help do not load torch.
            from tripool.engine.load import load_engine

            config = EngineConfig(
                kv_gb=kv_gb, max_running=max_running, mtp=mtp, precision=precision, threads=threads, device=device,
                exact=exact,
            )  # fmt: skip
            model = load_engine(model, config, progress=on_load)
        self._engine: StepEngine | None = model
        self.name = model.name
        self.context_tokens = model.context_tokens
        self.tokenizer = Tokenizer(model.text)
        self._mapped: dict[str, deque[TokenEvent | RequestFailed]] = {}
        """Unread events per open request: one step serves all readers."""
        self._begun: dict[str, Answer] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Generation]:
        """Answers in the order of the prompts, computed together. One prompt gives a list of one."""
        many = [cast(Prompt, prompts)] if _is_prompt(prompts) else cast(Sequence[Prompt], prompts)
        each = _params_for(len(many), params)
        return self.run([self.request(p, q) for p, q in zip(many, each, strict=True)], on_progress=on_progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Generation]:
        """Like `generate`, for one conversation (a list of messages with role and content) or a list of them."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        many = [cast(Conversation, conversations)] if one else cast(Sequence[Conversation], conversations)
        each = _params_for(len(many), params)
        requests = [self.chat_request(c, q) for c, q in zip(many, each, strict=True)]
        return self.run(requests, on_progress=on_progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TextStream:
        """Text as it is generated; iterate, then read `.generation`."""
        return TextStream(self._stream(self.request(prompt, params)))

    def stream_chat(self, conversation: Conversation, params: SamplingParams | None = None) -> TextStream:
        return TextStream(self._stream(self.chat_request(conversation, params)))

    def request(self, prompt: Prompt, params: SamplingParams | None = None, *, id: str | None = None) -> Request:
        """A request for `run`; text is tokenised here. `id` must be new; errors about the request name it."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._request(ids, params, id)

    def chat_request(
        self, conversation: Conversation, params: SamplingParams | None = None, *, id: str | None = None
    ) -> Request:
        return self._request(self.tokenizer.encode_chat(conversation), params, id)

    def run(self, requests: Sequence[Request], *, on_progress: OnProgress | None = None) -> list[Generation]:
        """Answers in the order of the requests. An invalid request fails the call before any work."""
        answers = {request.id: Answer(request, self.tokenizer) for request in requests}
        assert len(answers) == len(requests), "two requests share an id"
        left = dict(answers)
        try:
            for request in requests:
                self._add(request)
            while left:
                self._step()
                for request_id in [i for i in left if self._mapped[i]]:
                    if self._feed(left[request_id]):
                        self._forget(request_id)
                        del left[request_id]
                        if on_progress:
                            on_progress(len(answers) - len(left), len(answers))
        finally:
            for request_id in left:
                self._forget(request_id)
        return [answer.generation() for answer in answers.values()]

    def begin(self, request: Request) -> None:
        """Add a request whose answer `finished` will give. For callers that have more requests than fit in memory."""
        self._add(request)
        self._begun[request.id] = Answer(request, self.tokenizer)

    def finished(self) -> dict[str, Generation | RequestFailed]:
        """Step until some of the begun requests have ended, and give their answers by id; none if none is open."""
        ended: dict[str, Generation | RequestFailed] = {}
        while self._begun and not ended:
            self._step()
            for request_id in [i for i in self._begun if self._mapped[i]]:
                answer = self._begun[request_id]
                try:
                    if not self._feed(answer):
                        continue
                    ended[request_id] = answer.generation()
                except RequestFailed as failure:
                    ended[request_id] = failure
                self._forget(request_id)
        return ended

    def close(self) -> None:
        """Cancel open requests and release the engine's memory. Closing twice is fine."""
        for request_id in list(self._mapped):
            self._forget(request_id)
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt_ids: Sequence[int], params: SamplingParams | None, id: str | None) -> Request:
        params = params or SamplingParams()
        return Request(
            id=id or secrets.token_hex(8),
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            end_ids=self.tokenizer.end_ids,
        )

    def _stream(self, request: Request) -> Generator[str, None, Generation]:
        if request.params.n != 1:
            raise InvalidRequest(f"n is {request.params.n}", hint="a stream shows one answer", param="n")
        answer = Answer(request, self.tokenizer)
        try:
            receiver = self._add(request)
            while not answer.done:
                if not receiver:
                    self._step()
                while receiver and not answer.done:
                    delta = answer.take(_event(receiver.popleft()))
                    if delta is not None and delta.text:
                        yield delta.text
        finally:
            self._forget(request.id)
        return answer.generation()

    def _add(self, request: Request) -> deque[TokenEvent | RequestFailed]:
        try:
            self._running_engine().add(request)
        except TripoolError as refused:
            refused.add_note(f"request {request.id}")
            raise
        return self._mapped.setdefault(request.id, deque())

    def _step(self) -> None:
        for event in self._running_engine().step():
            receiver = self._mapped.get(event.request_id)
            if receiver is not None:
                receiver.append(event)
        for request_id in self._running_engine().take_failed():
            if request_id in self._mapped:
                self._mapped[request_id].append(RequestFailed.of(request_id))

    def _feed(self, answer: Answer) -> bool:
        """Pass the pending events to an answer; True when it is done."""
        receiver = self._mapped[answer.request.id]
        while receiver:
            answer.take(_event(receiver.popleft()))
        return answer.done

    def _forget(self, request_id: str) -> None:
        """Cancelling is idempotent: also right for finished requests and for those never added."""
        self._mapped.pop(request_id, None)
        self._begun.pop(request_id, None)
        if self._engine is not None:
            self._engine.cancel(request_id)

    def _running_engine(self) -> StepEngine:
        if self._engine is None:
            raise InvalidRequest("this LLM is closed", hint="make a new one")
        return self._engine


class TextStream(Iterator[str]):
    """Pieces of one answer's text; `generation` is set once all are read. `close()` cancels the rest."""

    def __init__(self, pieces: Generator[str, None, Generation]) -> None:
        self._pieces = pieces
        self.generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:  # a generator returns its value once, then None
                self.generation = end.value
            raise StopIteration from None

    def close(self) -> None:
        self._pieces.close()


def _event(item: TokenEvent | RequestFailed) -> TokenEvent:
    if isinstance(item, RequestFailed):
        raise item
    return item


def _is_prompt(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} params for {count} prompts", hint="give one, or one for each prompt")
    return params
