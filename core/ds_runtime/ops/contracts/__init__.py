"""The contracts of all ops, by area."""
