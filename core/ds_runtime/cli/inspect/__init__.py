"""Verbs that tell what is here and what would be done."""
