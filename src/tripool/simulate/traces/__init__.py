"""Requests for a simulation: when each comes, how long prompt and answer are, what it shares with others. Pure."""

from tripool.simulate.traces.ask import Ask, chain_keys, from_mooncake
from tripool.simulate.traces.azure import parse_azure
from tripool.simulate.traces.reuse import Reuse, ideal_reuse
from tripool.simulate.traces.servegen import draw_clients, mean_rate, parse_clients
from tripool.simulate.traces.synthetic import Synthetic

__all__ = [
    "Ask", "Reuse", "Synthetic", "chain_keys", "draw_clients", "from_mooncake", "ideal_reuse", "mean_rate",
    "parse_azure", "parse_clients",
]  # fmt: skip
