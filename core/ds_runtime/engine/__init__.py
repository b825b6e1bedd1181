"""Requests in, tokens out: scheduling, batches, the step loop and its processes."""
