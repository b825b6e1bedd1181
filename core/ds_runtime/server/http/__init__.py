"""HTTP itself: connections, bodies, keys, statuses and event streams."""
