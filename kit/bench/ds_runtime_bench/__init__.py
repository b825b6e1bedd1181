"""Measurements of a running model: throughput, latency, accuracy."""
