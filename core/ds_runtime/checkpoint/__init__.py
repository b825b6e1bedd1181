"""The files of a checkpoint: found, checked and read."""
