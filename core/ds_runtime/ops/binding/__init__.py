"""Offers become decisions, and decisions functions."""
