"""What DeepSeek-V4 is: its config.json, its weights, and where it calls which op. Torch-free."""
