"""A whole engine: speed, drafting, accuracy, and turns with another engine."""
