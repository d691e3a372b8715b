"""Kernels for CUDA devices, written in Triton. Under `TRITON_INTERPRET=1` they run on CPU tensors, for tests."""
