"""Between processes: message channels, KV transfer and the folder of a run. Knows no policy and no tensor."""

from tripool.fabric.channel import Line, Switchboard
from tripool.fabric.kv_transfer import KvReceiver, KvSender, Transfer
from tripool.fabric.link import Link
from tripool.fabric.loop import Loop

__all__ = ["Line", "Switchboard", "Link", "Loop", "KvReceiver", "KvSender", "Transfer"]
