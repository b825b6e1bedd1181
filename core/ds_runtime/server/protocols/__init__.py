"""Other protocols over the same requests: Anthropic's, OpenAI's Responses, and /generate."""
