"""A corpus of conversations: prompts made here, answers sampled from a teacher or written exactly, then cleaned.

Run as `python -m tiny.distil`. It does not import the trainer: it writes a folder of JSONL documents.
"""
