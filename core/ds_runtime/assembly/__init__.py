"""What start-up decides."""
