"""Platforms without a device: described ones, and the Null platform."""
