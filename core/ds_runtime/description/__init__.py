"""What a model and an adapter are, from their JSON files alone. Torch-free."""
