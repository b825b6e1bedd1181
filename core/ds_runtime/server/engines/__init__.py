"""The engines behind a server: clients, replicas, restarts."""
