"""Quantisation schemes: GGUF blocks as they are stored, and weights quantised while they load."""
