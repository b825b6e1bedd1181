"""KV beyond the device: which pages and states lie in host memory, and how they get there."""
