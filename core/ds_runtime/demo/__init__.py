"""A tiny trained DeepSeek-V3 checkpoint as package data; docs/demo.md says how it was made."""
