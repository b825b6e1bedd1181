"""Which steps with prompts run as two halves, and where these are divided. Torch-free.

While sums of one half travel between ranks, the other one computes. Weights are read twice, so only
steps of many tokens are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_runtime.config import EngineConfig
from ds_runtime.parallel.mesh import Mesh

_SHARE = 0.48  # unless it is said
_ALIGNED = 64  # rows of which the first half has a multiple, where it ends inside a prompt


@dataclass(frozen=True, slots=True)
class Halves:
    """least: tokens of prompts in a step that is divided; no half has fewer than a quarter of that.
    share: where whole sequences would give a half that has less than this of the step, one sequence
    is divided; 0: none ever is."""

    least: int
    share: float

    @staticmethod
    def of(config: EngineConfig, hybrid: bool) -> Halves | None:
        """None where no step is divided. hybrid: the model is one of the V4 family."""
        if why_not(config, hybrid) or not config.enable_two_batch_overlap:
            return None
        share = config.tbo_token_distribution_threshold
        return Halves(_least(config), _SHARE if share is None else share)

    def place(self, lengths: Sequence[int], fixed: int) -> tuple[int, int] | None:
        """Where to divide works of these lengths, of which the first `fixed` go together. Returns
        the number of whole works in the first half, and of the tokens of the next one that it has,
        too. None: the step is not divided."""
        if sum(lengths[fixed:]) < self.least:
            return None
        ends = list(accumulate(lengths))
        total, first = ends[-1], max(fixed, 1)
        at = min(range(first, len(lengths)), key=lambda n: abs(total - 2 * ends[n - 1]), default=0)
        fewest = max(self.share * total, self.least / 4)
        if at and min(ends[at - 1], total - ends[at - 1]) >= fewest:
            return at, 0
        if not self.share:
            return None
        half = total // 2
        middle = next(n for n, end in enumerate(ends) if end > half)
        if middle < fixed:
            return None
        begin = ends[middle] - lengths[middle]
        return middle, max(0, (half // _ALIGNED * _ALIGNED or half) - begin)

    def __str__(self) -> str:
        inside = f", inside a sequence where one would have less than {self.share} of it"
        return (
            f"steps with {self.least} tokens of prompts or more run as two halves, divided between "
            f"sequences{inside if self.share else ''}"
        )


def _least(config: EngineConfig) -> int:
    """Half of what a step can have, unless it is said."""
    return config.dbo_prefill_token_threshold or max(2, config.max_step_tokens // 2)


def why_not(config: EngineConfig, hybrid: bool) -> str:
    """Why no step of such an engine is divided, or ""."""
    if config.tp == 1:
        return "there is one rank"
    if Mesh.of(config).attn_dp > 1:
        return "it is not built yet for --enable-dp-attention"
    if config.batch_invariant:
        return "--batch-invariant adds ranks in order, where their parts are due"
    if hybrid:
        return "models of the V4 family have no such steps"
    if (most := config.max_step_tokens) < (least := _least(config)):
        given = config.dbo_prefill_token_threshold
        needed = f"the {least} that a divided step needs"
        needed = needed if given is None else f"--dbo-prefill-token-threshold {given}"
        return f"--max-step-tokens {most} is fewer than {needed}"
    return ""
