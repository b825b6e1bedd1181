"""`ds-runtime convert`: a checkpoint written again in another weight format."""
