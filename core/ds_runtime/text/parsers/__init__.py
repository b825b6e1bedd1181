"""Reasoning, content and tool calls in generated text."""
