"""Between processes: lines for messages, parcels for KV, the folder they live in. Knows no policy and no tensor."""

from tripool.fabric.channel import Line, Switchboard
from tripool.fabric.link import Link
from tripool.fabric.loop import Loop
from tripool.fabric.parcels import Inbox, Outbox
from tripool.fabric.seam import PoolEngine, Transfer

__all__ = ["Line", "Switchboard", "Link", "Loop", "Inbox", "Outbox", "PoolEngine", "Transfer"]
