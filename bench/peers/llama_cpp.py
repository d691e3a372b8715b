"""llama.cpp's own server (from the xllamacpp wheel) behind the benchmark protocol, spoken to over its own HTTP."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import xllamacpp
from worker import serve

# What the file's main tensor type says about arithmetic: its products run in the type's partner format.
BITS_OF_SUFFIX = {"q4_1": [4, 8], "q8_0": [8, 8], "bf16": [16, 16], "f32": [32, 32]}
SPARE_TOKENS = 8


class LlamaCpp:
    def load(self, model: str, threads: int, precision: str) -> dict[str, Any]:
        self.model, self.threads = model, threads
        self.server: xllamacpp.Server | None = None
        suffix = model.removesuffix(".gguf").rsplit("-", 1)[-1]
        features = [part.split(" = ")[0].strip() for part in xllamacpp.get_system_info().split(":", 1)[-1].split("|")]
        version = (
            f"llama.cpp {suffix.upper()} (xllamacpp {xllamacpp.__version__}, built for {' '.join(features).strip()})"
        )
        return {"version": version, "bits": BITS_OF_SUFFIX[suffix]}

    def prepare(self, concurrency: int, context_tokens: int) -> None:
        """A server of exactly as many slots as the workload has requests: idle slots cost attention time."""
        self.server = None
        params = xllamacpp.CommonParams()
        params.model.path = self.model
        params.n_parallel = concurrency
        params.n_ctx = concurrency * (context_tokens + SPARE_TOKENS)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.n_threads_http = concurrency + 2
        params.cont_batching = True
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        address = urlsplit(self.server.listening_address)
        assert address.hostname is not None
        self.host, self.port = address.hostname, address.port

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection(self.host, self.port)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = json.load(response)
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama.cpp answered {response.status}: {reply}")
        assert reply["tokens_evaluated"] == len(prompt), f"{reply['tokens_evaluated']} prompt tokens of {len(prompt)}"
        return reply["tokens"]


if __name__ == "__main__":
    serve(LlamaCpp())
