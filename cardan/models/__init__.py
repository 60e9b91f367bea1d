"""Decoders, written once and device-free; found by architecture name through entry points."""
