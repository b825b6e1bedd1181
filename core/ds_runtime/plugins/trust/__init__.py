"""Which plugins may be loaded, and what code their import would run."""
