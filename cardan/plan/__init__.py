"""Predictions for a model on a device, from sizes and peaks alone: nothing is loaded, no torch."""
