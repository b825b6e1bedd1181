"""Checkpoints of random weights in the sizes of published models."""
