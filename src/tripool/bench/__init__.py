"""Load generator for OpenAI endpoints and its measurements. Uses HTTP and statistics, never an engine."""

from tripool.bench.samples import Sample
from tripool.bench.summary import Goodput, Summary, summarise
from tripool.bench.workload import Shot, poisson_arrivals, random_shots, trace_shots

__all__ = ["Goodput", "Sample", "Shot", "Summary", "poisson_arrivals", "random_shots", "summarise", "trace_shots"]
