"""`ds-runtime bisect`: the first kernel of a running model that departs from its reference."""
