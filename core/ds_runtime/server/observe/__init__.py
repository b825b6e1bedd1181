"""What a server tells: log, traces, and a record of each request."""
