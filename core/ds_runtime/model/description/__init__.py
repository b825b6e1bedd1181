"""What a model is, from config.json alone. Torch-free."""
