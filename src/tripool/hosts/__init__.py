"""Several machines as one server: joining, authenticated connections, KV and cache blocks over TCP.

Every host of a run has one process that listens for the others (`server.py`). It relays the messages of workers, and
reads and writes the shared memory of its own host for the others: no process ever maps memory of another host.
"""
