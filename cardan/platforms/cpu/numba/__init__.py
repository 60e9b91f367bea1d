"""Kernels of the CPU platform compiled by numba, for machines without a C compiler."""
