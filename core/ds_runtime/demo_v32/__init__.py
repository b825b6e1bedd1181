"""The demo model's V3.2 sibling as package data: its indexers alone; docs/demo.md says more."""
