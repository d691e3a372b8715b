"""Trains the MTP layer of a trained network on the network's own answers; all other weights stay as they are.

Run as `python -m tiny.drafts`, between training and quantising.
"""
