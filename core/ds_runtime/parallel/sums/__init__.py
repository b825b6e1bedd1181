"""Sums over ranks: by the size of the message, or in the order of the ranks."""
