"""The verb `ds-runtime bench` and its sub-commands. Torch-free at import."""
