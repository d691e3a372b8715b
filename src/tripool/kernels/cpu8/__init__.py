"""CPU kernels with 8-bit weights, row-invariant to the bit: C, called with ctypes.

Weights and activations are divided into groups of 64 along the sum, with a scale per group. Sums within a group are
integer sums, exact in any order; everything else is computed row by row in a fixed order. The C sources, in
`kernels/native`, are compiled when the package is installed, never at run time.
"""
