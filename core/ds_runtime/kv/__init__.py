"""The paged KV cache: its pages, the prefixes that it keeps, and how large it is."""
