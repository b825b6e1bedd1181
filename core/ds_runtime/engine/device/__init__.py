"""One rank's device: load, warm up, launch and collect."""
