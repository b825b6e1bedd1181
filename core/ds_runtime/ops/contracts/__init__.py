"""The contracts of all ops, by area: all that is said of an op stands in one file."""
