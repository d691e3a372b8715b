"""The router: admission, fairness, placement, and the ledger of requests. Pure; the gateway drives it."""

from tripool.router.coordinator import Coordinator
from tripool.router.outputs import Emit, Fail, Output, Send, ToSupervisor

__all__ = ["Coordinator", "Emit", "Fail", "Output", "Send", "ToSupervisor"]
