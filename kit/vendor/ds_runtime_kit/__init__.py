"""The vendor kit: what a plugin is written, tested and looked into with."""
