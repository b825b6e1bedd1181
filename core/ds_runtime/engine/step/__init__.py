"""One step: its plan, its input tensors, its draw and its result."""
