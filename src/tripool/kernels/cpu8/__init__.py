"""CPU versions with 8-bit weights whose every row is independent of its neighbours, to the bit: C, called by ctypes.

Weights and activations are divided into groups of 64 along each sum, with a scale per group; sums within a group are
sums of integers, exact in any order, and everything else is computed row by row in a fixed order. The C sources, in
`kernels/native`, are compiled when the package is installed; nothing is compiled at run time.
"""
