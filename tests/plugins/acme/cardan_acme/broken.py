"""A platform whose driver library is missing: its import fails."""

raise OSError("librocket.so.7: cannot open shared object file")
