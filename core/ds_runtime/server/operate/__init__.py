"""Routes for whoever operates the server."""
