"""The offline API: a model in this process."""
