"""Small models and adapters for tests, and transformers as their oracle."""
