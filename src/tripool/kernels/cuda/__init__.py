"""CUDA versions: torch's fused operators and our Triton kernels, over rows that are described on the device.

Nothing here asks the host about values, so a step over decode rows can be captured in a graph. The torch parts run on
any device, which is how they are tested where there is no GPU; Triton parts are used on CUDA alone.
"""
