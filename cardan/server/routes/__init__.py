"""The HTTP routes, one module a group."""
