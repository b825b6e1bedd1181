"""What a step that carries prompts takes, learnt from the steps that were.

A step's seconds are a sum of terms, one each for:

* the step itself;
* the prompts in it;
* their new tokens;
* the pairs of tokens that their attention looks at;
* the cached tokens before them that are expanded again;
* the tokens that are decoded;
* the context of these;
* the pairs of tokens of prompts that attend as decoded ones do;
* the pages that come from host memory.

No term is below zero, so that more of anything never looks cheaper. The terms are fitted by least
squares of relative errors, in which the last hundred such steps count most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

_KEPT = 0.98  # of what is known, per step that is noted
_SWEEPS = 4  # of coordinate descent, per step that is noted
_ENOUGH = 3  # steps before anything is said
_SETTLED = 8  # steps before one can be out of line
_ODD = 4.0  # by so much: once it is left out, twice in a row it counts
_NEVER = 1e-12  # seconds: a term that is as good as zero
_SIZE = 9


@dataclass(slots=True)
class Load:
    """What a step computes. prompts: works of them; tokens: their new ones; pairs: of these with
    those that they look at; prefix: tokens before them; rows: tokens that are decoded, with drafts;
    context: tokens before these. absorbed: pairs of the `absorbed_tokens` among those of prompts,
    which attend as decoded tokens do: they are neither in `pairs` nor in `prefix`. loaded: pages
    that come from host memory.
    """

    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0
    prefix: int = 0
    rows: int = 0
    context: int = 0
    absorbed: float = 0.0
    absorbed_tokens: int = 0
    loaded: int = 0

    def add_prompt(self, start: int, length: int, absorbed: bool = False) -> None:
        """One more work of a prompt: tokens [start, start + length) of its sequence."""
        self.prompts += 1
        self.tokens += length
        pairs = length * (start + length / 2)
        if absorbed:
            self.absorbed += pairs
            self.absorbed_tokens += length
        else:
            self.pairs += pairs
            self.prefix += start

    @property
    def terms(self) -> tuple[float, ...]:
        """In units that make the seconds of each of about one size."""
        return (
            1.0,
            self.prompts / 4,
            self.tokens / 256,
            self.pairs / 262144,
            self.prefix / 1024,
            self.rows / 32,
            self.context / 32768,
            self.absorbed / 65536,
            self.loaded / 64,
        )


class StepCost:
    """Seconds of steps with prompts, by what they compute."""

    def __init__(self) -> None:
        self._left = [[0.0] * _SIZE for _ in range(_SIZE)]  # the normal equations
        self._right = [0.0] * _SIZE
        self._found = [0.0] * _SIZE
        self._odd = False
        self.count = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen."""
        return self.count >= _ENOUGH

    def seconds(self, load: Load) -> float:
        """Of a step, at least 0."""
        return float(sum(map(mul, self._found, load.terms)))

    def note(self, load: Load, seconds: float) -> None:
        """A step with prompts took so long. One that is far out of line is left out, as it may have
        compiled a kernel; the next like it is not.
        """
        guess = self.seconds(load)
        if self.count >= _SETTLED and seconds > _ODD * guess and not self._odd:
            self._odd = True
            return
        self._odd = False
        self.count += 1
        terms = load.terms
        weight = 1 / max(guess, 0.3 * seconds, 1e-5) ** 2
        for i, term in enumerate(terms):
            row, scaled = self._left[i], weight * term
            for j, other in enumerate(terms):
                row[j] = _KEPT * row[j] + scaled * other
            self._right[i] = _KEPT * self._right[i] + scaled * seconds
        self._fit()

    def _fit(self) -> None:
        found = self._found
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._left):
                if row[i] > 0:
                    rest = self._right[i] - sum(map(mul, row, found)) + row[i] * found[i]
                    found[i] = max(0.0, rest / row[i])

    def chunk(self, start: int, seconds: float, absorbed: bool = False) -> float:
        """The most new tokens after `start` cached ones that a step of a prompt may add within
        `seconds`; may be infinite. absorbed: they attend as decoded tokens do.
        """
        fixed, slope, curve = self._chunk_terms(start, absorbed)
        left = seconds - fixed
        if left <= 0:
            return 0.0
        # curve / 2 n² + slope n = left, in the form that loses no digits where the curve is small
        below = slope + math.sqrt(slope * slope + 2 * curve * left)
        return 2 * left / below if below > _NEVER else math.inf

    def least(self, start: int, absorbed: bool = False) -> float:
        """New tokens after `start` cached ones that take as long as what every chunk there costs,
        however short: with fewer, most of the time is no progress. May be infinite.
        """
        fixed, slope, _ = self._chunk_terms(start, absorbed)
        return fixed / slope if slope > _NEVER else (math.inf if fixed > _NEVER else 0.0)

    def _chunk_terms(self, start: int, absorbed: bool) -> tuple[float, float, float]:
        """Seconds of a chunk behind `start` tokens, of each of its first tokens, and of a pair."""
        _, prompt, token, pair, prefix, _, _, latent, _ = self._found
        if absorbed:
            return prompt / 4, token / 256 + latent * start / 65536, latent / 65536
        fixed = prompt / 4 + prefix * start / 1024
        return fixed, token / 256 + pair * start / 262144, pair / 262144
