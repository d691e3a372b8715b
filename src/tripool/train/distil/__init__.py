"""Documents for a small assistant: prompts made here, answers sampled from a teacher or written exactly, then cleaned.

Run as `python -m tripool.train.distil`. Knows nothing of the student: the seam is a folder of JSONL documents.
"""
