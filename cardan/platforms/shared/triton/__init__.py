"""Kernels in Triton, for any device that Triton compiles for, and their providers."""
