"""Plugins: found, trusted, tried apart and asked."""
