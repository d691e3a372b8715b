"""The oracle: small random models made, saved and run by transformers, and ways to drive our runner beside them.

Nothing here knows how Tripool computes; it only hands out folders, token lists, block tables and reference logits.
"""
