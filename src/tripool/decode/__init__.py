"""The decode room: the running batch. Exports pure names only."""

from tripool.decode.scheduler import DecodeScheduler

__all__ = ["DecodeScheduler"]
