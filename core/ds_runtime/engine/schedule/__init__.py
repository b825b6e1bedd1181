"""Which request computes what in the next step, and who owns which pages."""
