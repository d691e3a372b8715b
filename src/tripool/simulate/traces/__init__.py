"""Requests for a simulation: read from published formats, or drawn. Pure."""

from tripool.simulate.traces.azure import parse_azure
from tripool.simulate.traces.servegen import draw_clients, mean_rate, parse_clients
from tripool.simulate.traces.synthetic import Synthetic

__all__ = ["Synthetic", "draw_clients", "mean_rate", "parse_azure", "parse_clients"]
