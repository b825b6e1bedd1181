"""The demo model's V4 sibling as package data; docs/demo.md says more."""
