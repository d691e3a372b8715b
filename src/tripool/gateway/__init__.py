"""The HTTP gateway: the OpenAI and Anthropic APIs. Knows text and HTTP, never tensors; imports no engine."""

from tripool.gateway.app import create_models_app
from tripool.gateway.backend import Backend

__all__ = ["create_models_app", "Backend"]
