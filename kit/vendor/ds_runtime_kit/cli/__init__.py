"""The verbs `conform`, `bisect` and `new-plugin`. Torch-free at import."""
