"""Kernels in Pallas, for TPUs and, interpreted, for any device of jax."""
