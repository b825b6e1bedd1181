"""Kernels one by one: inputs of true sizes, minimal work, and times."""
