"""The contracts: one file per area, each op with Protocol, reference, samples and tolerance."""
