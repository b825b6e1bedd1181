"""Kernels in Triton's language, one file per area. They know sizes and strides, no device."""
