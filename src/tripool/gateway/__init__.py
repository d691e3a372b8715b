"""HTTP in, tokens out: the OpenAI surface. Knows text and HTTP, never tensors; imports no engine."""

from tripool.gateway.app import create_models_app
from tripool.gateway.backend import Backend

__all__ = ["create_models_app", "Backend"]
