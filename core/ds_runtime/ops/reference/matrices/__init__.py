"""References of everything that is a matrix."""
