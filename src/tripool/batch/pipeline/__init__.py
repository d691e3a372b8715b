"""Pipelines: train or import, quantise, evaluate, register, canary, publish; resumable after and inside any stage.

Calls what `tripool train`, `quantize` and `eval` call; artefacts are in the pipeline's folder, versions in the
registry. Knows a running server only by what it is given.
"""

from tripool.batch.pipeline.config import PipelineError, read_pipeline
from tripool.batch.pipeline.run import CanaryFailed, CanaryServer, GateFailed, Outcome, Run

__all__ = ["CanaryFailed", "CanaryServer", "GateFailed", "Outcome", "PipelineError", "Run", "read_pipeline"]
