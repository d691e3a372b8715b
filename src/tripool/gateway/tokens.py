"""`/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's format, and Anthropic's token count: no engine needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tripool.errors import InvalidRequest
from tripool.gateway.auth import caller_of
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs
from tripool.gateway.fair_pool import FairPool
from tripool.gateway.messages import to_message
from tripool.gateway.options import ANTHROPIC_COUNT, DETOKENIZE, TOKENIZE
from tripool.gateway.parse import Parser
from tripool.gateway.tools import Tools
from tripool.text import Tokenizer

if TYPE_CHECKING:
    from tripool.gateway.models import Models

_LEAST_SIZE = 1024
"""Added to the bytes of each body, so that many small ones are bounded too."""


class TokenService:
    """Bodies in, JSON out. Long texts take a while: call it outside the event loop."""

    def __init__(self, parser: Parser, tokenizer: Tokenizer, context_tokens: Callable[[], int]) -> None:
        self._parser, self._tokenizer, self._context_tokens = parser, tokenizer, context_tokens
        self._encoder = parser.encoder

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        self._encoder.check_body(len(raw), "prompt")
        fields = self._parser.fields(raw, TOKENIZE)
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidRequest("needs either 'prompt' or 'messages'", param="prompt")
        if "prompt" in fields:
            ids = self._encoder.encode(fields["prompt"], special=fields.get("add_special_tokens", True))
        else:
            conversation = [to_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
            ids = self._parser.chat_ids(fields, conversation, Tools(shown=fields.get("tools", ())))
        strings = [self._tokenizer.token(i) for i in ids] if fields.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self._context_tokens(), "tokens": ids, "token_strs": strings}

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        self._encoder.check_body(len(raw), "tokens")
        tokens = self._parser.fields(raw, DETOKENIZE)["tokens"]
        self._encoder.check_ids(len(tokens), "tokens")
        bad = next((i for i in tokens if not 0 <= i < self._tokenizer.vocab_size), None)
        if bad is not None:
            hint = f"ids run from 0 to {self._tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"there is no token {str(bad)[:30]}", hint=hint, param="tokens")
        return {"prompt": self._tokenizer.decode(tokens, skip_special=False)}

    def info(self) -> dict[str, Any]:
        """In the form of a tokenizer_config.json, as far as a checkpoint's text files say."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._context_tokens(),
            "chat_template": self._tokenizer.chat_template,
            **self._tokenizer.special_tokens,
        }

    def count(self, raw: bytes) -> dict[str, Any]:
        self._encoder.check_body(len(raw), "messages")
        return {"input_tokens": self._parser.count(raw)}


def token_routes(models: Models, bodies: Bodies, pool: FairPool) -> APIRouter:
    """The work runs in `pool`, including the encoding of long answers."""
    routes = APIRouter()

    async def answer(http: HttpRequest, read: Callable[[TokenService, bytes], dict[str, Any]]) -> Response:
        tenant = caller_of(http).tenant
        await models.enter(tenant)
        raw = await bodies.read(http)
        models.read(tenant, len(raw))

        def encoded() -> bytes:
            return msgspec.json.encode(read(models.meant_by(raw).tokens, raw))

        body = await pool.run(tenant.name, encoded, size=len(raw) + _LEAST_SIZE)
        return Response(body, media_type="application/json")

    @routes.post("/tokenize", openapi_extra=body_docs(TOKENIZE.schema()))
    async def tokenize(http: HttpRequest) -> Response:
        return await answer(http, TokenService.tokenize)

    @routes.post("/detokenize", openapi_extra=body_docs(DETOKENIZE.schema()))
    async def detokenize(http: HttpRequest) -> Response:
        return await answer(http, TokenService.detokenize)

    @routes.get("/tokenizer_info")
    async def tokenizer_info(model: str = "") -> dict[str, Any]:
        """Special tokens and chat template, of the default model if none is named."""
        return (models.find(model) if model else models.default).tokens.info()

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_docs(ANTHROPIC_COUNT.schema()))
    async def count_tokens(http: HttpRequest) -> Response:
        return await answer(http, TokenService.count)

    return routes
