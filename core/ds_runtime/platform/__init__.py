"""Devices as the core sees them: a Platform object per process, given by a plugin."""
