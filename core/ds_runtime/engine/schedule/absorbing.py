"""Which chunks of prompts attend what is cached as decode does: its latents as they lie there.

Other chunks expand the cached latents to keys and values of all heads first. That costs the same
however short the chunk is, and pays once many rows share it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from ds_runtime.assembly.result import Assembly


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
    def of(cls, assembly: Assembly, kernels: Iterable[object]) -> Absorbing | None:
        """kernels: all that attend decode rows. None where one of them has no `many_rows`, where
        attention has another form anyway, and where drafts branch."""
        config, model = assembly.config, assembly.model
        other = model.indexing is not None or model.hybrid is not None or model.expanded
        branch = (
            config.speculative_algorithm is not None and (config.speculative_eagle_topk or 1) > 1
        )
        if other or branch or config.batch_invariant:
            return None
        found = [*kernels]
        if not found or not all(getattr(kernel, "many_rows", False) for kernel in found):
            return None
        dims = assembly.facts.dims
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


def most_absorbed(assembly: Assembly, kernels: Iterable[object], context: int) -> int:
    """Tokens of prompts in one step. kernels: as in `Absorbing.of`; context: tokens of a sequence
    at most."""
    rule, config = Absorbing.of(assembly, kernels), assembly.config
    each = 0 if rule is None else rule.most(context)
    return min(config.max_running_requests * each, config.max_step_tokens)
