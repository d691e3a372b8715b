"""GGUF files as checkpoints: bytes, a config and a tokenizer in the layouts that Hugging Face folders have."""

from tripool.checkpoints.gguf.checkpoint import GgufCheckpoint

__all__ = ["GgufCheckpoint"]
