"""The router: who computes what, who owns it, and what happens when they vanish. Pure; a gateway drives it."""

from tripool.router.coordinator import Coordinator
from tripool.router.outputs import Emit, Fail, Output, Send, ToSupervisor

__all__ = ["Coordinator", "Emit", "Fail", "Output", "Send", "ToSupervisor"]
