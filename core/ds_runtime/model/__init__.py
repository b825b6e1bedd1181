"""DeepSeek models: config, layers, weights. Model code names no device and branches on none."""
