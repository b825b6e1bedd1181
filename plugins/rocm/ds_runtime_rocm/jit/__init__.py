"""Kernels written in TileLang, which makes code for AMD's GPUs and for NVIDIA's."""
