"""Small things that many rooms use."""
