"""How a chat becomes a prompt: templates by family."""
