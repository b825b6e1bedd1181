"""Blocks of caches that go from one engine to another."""
