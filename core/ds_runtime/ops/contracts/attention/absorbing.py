"""Which chunks of prompts attend what is cached as decode does: its latents as they lie there.

Other chunks expand the cached latents to keys and values of all heads first. That costs the same
however short the chunk is, and pays once many rows share it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ds_runtime.ops.contract import Dims, Kernel


@dataclass(frozen=True, slots=True)
class Absorbing:
    """The rule, by what both ways compute and move. Widths of one rank's model, as in Facts.dims.

    Queries are absorbed where that takes fewer FLOPs than expanding, and moves fewer numbers to and
    from memory. What both ways do alike is left out: the products of the chunk's own rows with
    kv_b, and reading the cache once.
    """

    heads: int
    nope: int
    rope: int
    v: int
    latent: int

    @classmethod
    def of(cls, dims: Dims, kernels: Sequence[Kernel]) -> Absorbing | None:
        """kernels: all that attend decode rows. None where one of them does not promise
        `many_rows`."""
        if not kernels or not all(kernel.promises.many_rows for kernel in kernels):
            return None
        names = ("heads", "qk_nope", "qk_rope", "v", "kv_lora")
        return cls(*(dims[name] for name in names))

    def most(self, end: int) -> int:
        """The longest chunk up to token `end` that is absorbed."""
        return bisect_left(range(1, end + 1), 1, key=lambda n: not self.pays(end - n, n))

    def pays(self, start: int, length: int) -> bool:
        """Whether `length` new tokens after `start` cached ones are absorbed."""
        pairs = length * (start + (length + 1) / 2)  # of a row and a token that it sees
        keys_values, absorbed = self.nope + self.v, 2 * self.latent + self.rope
        products = start * keys_values * self.latent  # per head, in multiplications, as below
        if pairs * absorbed >= products + pairs * (keys_values + self.rope):
            return False
        # Written once and read once: keys and values of all tokens, with the latents that these
        # are made from, or queries and attended latents of the rows.
        latents = start * (self.latent + self.rope)
        return (
            length * self.heads * absorbed < (start + length) * self.heads * keys_values + latents
        )
