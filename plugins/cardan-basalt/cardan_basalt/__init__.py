"""The Basalt B1 for cardan."""
