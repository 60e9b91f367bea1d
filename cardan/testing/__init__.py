"""What authors of platforms test with: a device that only poses as one, and the kit."""
