"""Plugins for cardan, one of each kind."""
