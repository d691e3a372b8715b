"""CUDA kernels: torch's fused operators and Triton kernels, over batches described on the device.

Nothing here reads device values on the host, so a decode step can be captured in a CUDA graph. The torch parts run on
any device, which is how they are tested without a GPU; the Triton parts run on CUDA only.
"""
