"""Kernels of compiled layers."""

KERNELS = "compiled"
"""The profile of kernels of layers that torch.compile compiles."""
