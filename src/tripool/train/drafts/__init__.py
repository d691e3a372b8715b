"""The draft layer taught by the network it drafts for: on the network's own answers, the rest of it left as it is.

Run as `python -m tripool.train.drafts`, between training and quantising.
"""
