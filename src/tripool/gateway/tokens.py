"""`/tokenize` and `/detokenize`, in vLLM's shapes, and Anthropic's count: text to tokens and back, no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from tripool.errors import InvalidRequest
from tripool.gateway.bodies import Bodies
from tripool.gateway.body import body_docs
from tripool.gateway.messages import to_message
from tripool.gateway.options import ANTHROPIC_COUNT, DETOKENIZE, TOKENIZE
from tripool.gateway.parse import Parser
from tripool.gateway.tools import Tools
from tripool.text import Tokenizer


class TokenService:
    """Takes bodies, gives answers. Long texts take milliseconds: call it outside the event loop."""

    def __init__(self, parser: Parser, tokenizer: Tokenizer, context_tokens: Callable[[], int]) -> None:
        self._parser, self._tokenizer, self._context_tokens = parser, tokenizer, context_tokens

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        fields = self._parser.fields(raw, TOKENIZE)
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidRequest("needs either 'prompt' or 'messages'", param="prompt")
        if "prompt" in fields:
            ids = self._tokenizer.encode(fields["prompt"], special=fields.get("add_special_tokens", True))
        else:
            conversation = [to_message(message, f"messages[{i}]") for i, message in enumerate(fields["messages"])]
            ids = self._parser.chat_ids(fields, conversation, Tools(shown=fields.get("tools", ())))
        strings = [self._tokenizer.token(i) for i in ids] if fields.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self._context_tokens(), "tokens": ids, "token_strs": strings}

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        tokens = self._parser.fields(raw, DETOKENIZE)["tokens"]
        bad = next((i for i in tokens if not 0 <= i < self._tokenizer.vocab_size), None)
        if bad is not None:
            hint = f"ids run from 0 to {self._tokenizer.vocab_size - 1}"
            raise InvalidRequest(f"there is no token {str(bad)[:30]}", hint=hint, param="tokens")
        return {"prompt": self._tokenizer.decode(tokens, skip_special=False)}

    def count(self, raw: bytes) -> dict[str, Any]:
        return {"input_tokens": self._parser.count(raw)}


def token_routes(service_of: Callable[[bytes], TokenService], bodies: Bodies) -> APIRouter:
    """`service_of` a body: that of the model which the body names."""
    routes = APIRouter()

    async def answer(http: HttpRequest, read: Callable[[TokenService, bytes], dict[str, Any]]) -> dict[str, Any]:
        raw = await bodies.read(http)
        return await asyncio.to_thread(lambda: read(service_of(raw), raw))

    @routes.post("/tokenize", openapi_extra=body_docs(TOKENIZE.schema()))
    async def tokenize(http: HttpRequest) -> dict[str, Any]:
        return await answer(http, TokenService.tokenize)

    @routes.post("/detokenize", openapi_extra=body_docs(DETOKENIZE.schema()))
    async def detokenize(http: HttpRequest) -> dict[str, Any]:
        return await answer(http, TokenService.detokenize)

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_docs(ANTHROPIC_COUNT.schema()))
    async def count_tokens(http: HttpRequest) -> dict[str, Any]:
        return await answer(http, TokenService.count)

    return routes
