"""DeepSeek-V4: several residual streams, attention over a window and compressed entries."""
