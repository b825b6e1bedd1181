"""What is asked of a checkpoint's loader, and checkpoints to ask it with."""
