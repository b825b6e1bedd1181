"""From a checkpoint to packed weights on a device."""
