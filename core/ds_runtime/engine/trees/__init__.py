"""Drafts as trees. Optional: `speculate/branching.py` alone names this folder."""
