"""Speculative decoding: drafts, and which of them were right."""
