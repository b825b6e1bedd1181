"""bfloat16 weights in 12 bits each, without loss, and the kernels that read them."""
