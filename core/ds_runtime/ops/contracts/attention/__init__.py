"""The contracts of attention, its caches and what is in front of it."""
