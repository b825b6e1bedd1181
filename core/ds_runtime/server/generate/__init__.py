"""One generating request: from its body to prompts, and from tokens to an answer."""
