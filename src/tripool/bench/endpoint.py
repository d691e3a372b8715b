"""An OpenAI endpoint: its models, the token counts of words, and request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tripool.bench.prompts import ORDINARY_IDS, Pieces, TextPrompts, TokenPrompts, choose_words
from tripool.bench.wire import Address, CannotConnect, ExchangeFailed, HttpClient
from tripool.bench.workload import Shot
from tripool.errors import InvalidRequest

_TEXT = """
able after air also and answer area away ball batch bear bed begin best between bird block boat book box bring build
cache can care cat change city clear cold come cook cost count course cross cut day decode deep dog down dress dry
early ease eat end even every expert eye fact family farm father feet field find fire fish flat fly food force found
free from full gave girl glass gold got green group had hand hard have hear heat here hill home hot house hundred if
island just kind know language last laugh lay learn lease leave less letter light line listen live look love machine
make many mark mean men mile mind money moon morning mother move music name need new night north nothing noun number
off old one open order our over page part pattern peer people picture place plan plant point pool pose prefill problem
question rain reach ready record rest river rock round route rule sail saw school second self serve seven shape ship
should side since six sleep small so song south spell star state step stop street study sun surface tail talk tell
test that their then these thing this though thousand through to token took toward travel true turn under until use
very vowel walk war was water week well were what when which white whole will with wood work would year yet young
"""

WORDS = tuple(_TEXT.split())


Api = Literal["chat", "completions"]

PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ASK_WITHIN_S = 30.0
_HELLO = [{"role": "user", "content": "x"}]


class UnfitServer(InvalidRequest, code="unfit_server"):
    """The server answers, but not as an OpenAI endpoint."""


async def ask(client: HttpClient, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """A status and the JSON that came with it; None for anything else."""
    parts: list[bytes] = []
    status = await client.exchange(method, path, body, lambda _, data, __: parts.append(data), timeout_s=ASK_WITHIN_S)
    try:
        return status, msgspec.json.decode(b"".join(parts))
    except msgspec.MsgspecError:
        return status, None


async def find_model(client: HttpClient, address: Address, model: str | None) -> str:
    """The model for requests: the given one, or the first that the server lists."""
    try:
        status, reply = await ask(client, "GET", "/v1/models")
    except ExchangeFailed as failure:
        hint = "is `tripool serve` running?" if failure.kind == "refused" else "is --url right?"
        raise CannotConnect(f"cannot reach {address}: {failure.kind}: {failure.detail}", hint=hint) from failure
    if model is not None:
        return model
    try:
        return str(reply["data"][0]["id"])
    except (TypeError, LookupError):
        hint = "name one with --model"
        raise UnfitServer(f"{address}/v1/models lists no model (status {status})", hint=hint, param="model") from None


class BodyMaker:
    """Request bodies. They hold every field that determines the answer, so a run with the same seed sends the
    same requests.
    """

    def __init__(self, api: Api, model: str, prompts: TokenPrompts | TextPrompts, seed: int, ignore_eos: bool) -> None:
        self._prompts = prompts
        self._common: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "seed": seed,
        }
        if ignore_eos:
            self._common["ignore_eos"] = True
        self.path = PATHS[api]

    def body(self, shot: Shot) -> bytes:
        prompt = self._prompt(shot.pieces)
        return msgspec.json.encode(prompt | {"max_tokens": shot.output_tokens} | self._common)

    def _prompt(self, pieces: Pieces) -> dict[str, Any]:
        if isinstance(self._prompts, TokenPrompts):
            return {"prompt": self._prompts.ids(pieces)}
        return {"messages": [{"role": "user", "content": self._prompts.text(pieces)}]}


async def make_prompts(client: HttpClient, api: Api, model: str, seed: int) -> TokenPrompts | TextPrompts:
    """Completions take token ids, so their lengths are exact; chats get words, one token each where possible."""
    counter = _Counter(client, model)
    try:
        tokens = {word: await counter.tokens(" " + word) for word in WORDS} if await counter.present() else {}
        if api == "completions":
            ids = sorted({token_id for found in tokens.values() for token_id in found})
            return TokenPrompts(ids or ORDINARY_IDS, seed)
        if not tokens:
            return TextPrompts(WORDS, seed)
        words, word_tokens = choose_words({word: len(found) for word, found in tokens.items()})
        spare = await counter.around_a_chat()
        return TextPrompts(words, seed, word_tokens=word_tokens, spare_tokens=spare)
    except ExchangeFailed as failure:
        raise CannotConnect(f"the connection was lost: {failure.kind}: {failure.detail}") from failure


class _Counter:
    """Counts tokens with `/tokenize`, which many servers have."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client, self._model = client, model

    async def present(self) -> bool:
        return bool(await self.tokens("x"))

    async def tokens(self, text: str) -> list[int]:
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def around_a_chat(self) -> int:
        """Tokens that the chat template adds to a message."""
        whole = await self._tokenize({"messages": _HELLO, "add_generation_prompt": True})
        return max(0, len(whole) - len(await self.tokens("x")))

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        encoded = msgspec.json.encode({"model": self._model} | body)
        status, reply = await ask(self._client, "POST", "/tokenize", encoded)
        found = reply.get("tokens") if status == 200 and isinstance(reply, dict) else None
        if not isinstance(found, list) or not all(type(token_id) is int for token_id in found):
            return []
        return found
