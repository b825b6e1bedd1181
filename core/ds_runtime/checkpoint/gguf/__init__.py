"""GGUF files of architecture `deepseek2` as checkpoints.

What their metadata says is written as the JSON files of a checkpoint folder, once; tensors are
read from the GGUF files themselves.
"""
