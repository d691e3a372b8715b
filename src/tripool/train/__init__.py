"""The training room: a corpus of conversations in, a checkpoint of our own network out.

Stands on `models`, `kernels`, `checkpoints` and `text`. Knows no engine, no server and no socket, so that it also runs
on machines that have torch and little else.
"""
