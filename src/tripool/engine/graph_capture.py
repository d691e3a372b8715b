"""Captures CUDA graphs that share their memory: one of them runs at a time, in the order of one stream.

`torch.cuda.graph` collects garbage and empties the allocator's cache before each capture. A server captures hundreds of
graphs, some of them while sequences wait, so this does neither.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class GraphCapture:
    """What a graph returns stays where it is until that graph runs again; what it used on the way may be another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        """One for all captures: memory is reused within a stream only."""
        self.capture_s = 0.0
        """Time that captures have taken, without the runs before them."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """`run` as a graph: the same launches over the same memory, and the same tensor each time."""
        with self.beside():
            run()
        with self.graph() as graph:
            out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Runs on the stream of captures: compiles kernels and opens libraries outside the graphs."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def graph(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What is launched inside becomes the graph, also if an exception ends it."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        began_s = time.perf_counter()
        with _no_collection(), torch.cuda.stream(self._stream):
            # Other threads serve other models meanwhile: what they call must not end this capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                self._end(graph)
                self.capture_s += time.perf_counter() - began_s

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # The allocator takes the pool of a broken capture to be recording still, and refuses the next capture.
            self._pool = torch.cuda.graph_pool_handle()
            raise


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection could find graphs of an engine that is gone, and destroying a graph breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Address:
    """A tensor's memory in the form in which libraries share device arrays, without a reference to the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a graph, whose memory other graphs may use once the tensor itself is gone: valid until the next one
    runs."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)
