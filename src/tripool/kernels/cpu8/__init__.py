"""CPU versions with 8-bit weights whose every row is independent of its neighbours, to the bit.

Products over a varying number of rows are sums of integers, which are exact in any order. Attention works on shapes
that depend on a row's position alone: tiles of 64 aligned positions for prompts, one row at a time for decoding.
Elementwise ops are those whose vector and scalar versions agree.
"""
