"""Triton kernels of these tests run on the device that `oracle.triton_device` chooses."""

from oracle.triton_device import device  # noqa: F401 (a fixture)
