"""Ranks: who holds which part of the model, and how they talk."""
