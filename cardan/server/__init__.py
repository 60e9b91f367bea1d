"""The OpenAI-compatible HTTP server in front of a `ServingEngine`."""
