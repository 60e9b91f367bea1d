"""Two platforms side by side: where the second one's numbers leave the first one's."""
