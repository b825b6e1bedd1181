"""What is asked of a kernel: values, memory, capture, refusals, batch invariance."""
