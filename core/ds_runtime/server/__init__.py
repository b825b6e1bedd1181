"""HTTP in and out: OpenAI-compatible routes in front of an engine process."""
