"""The rank for which the others wait, where ranks divide experts by number. Torch-free.

Each token chooses for itself, and every expert is as likely as another: ranks differ by chance
alone. Trained weights choose less evenly. By how much depends on the text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from ds_runtime.ops.contract import Routing
from ds_runtime.ops.contracts.work import Sizes, distinct_experts
from ds_runtime.ops.declare import OpWork

_TAIL = 1e-15  # of the most likely count's probability: rarer counts are left out


@dataclass(frozen=True, slots=True)
class Busiest:
    """experts: that have a token, of the rank that has the most of them. choices: of a rank's
    experts, by all tokens, of the rank that has the most of those. Both are expected values."""

    experts: float
    choices: float


@lru_cache(maxsize=4096)
def busiest_rank(routing: Routing, parts: int, tokens: int) -> Busiest:
    """What the busiest of `parts` ranks expects; each has as many experts, one after the other.

    Two ranks together have what all have, so that their sums over experts hang together. A rank's
    sum counts as a part common to all and a part of its own. The variance of its own part is that
    of the sum less the covariance of two ranks. For normal variables that is exact (D. B. Owen and
    G. P. Steck, Annals of Mathematical Statistics 33, 1962, 1286). These parts are counts: each has
    the distribution of H. H. Panjer's class (ASTIN Bulletin 12, 1981, 22) with the sum's mean and
    this variance. Mean, variance and covariance are exact, as a token draws groups and then
    experts, both without replacement.

    It is within a tenth of what draws say, and of two ranks within a hundredth or two. A token must
    take at most a quarter of the experts that it may choose, in at least three groups or in one.
    parts divides the experts. One part, or no token: the means.
    """
    count, k, each = routing.num_experts, routing.top_k, routing.num_experts // parts
    choices, experts = tokens * k / parts, distinct_experts(count, k, tokens) / parts
    if parts == 1 or not tokens:
        return Busiest(experts, choices)
    pairs, one = _pairs(routing, parts), k / count
    chosen = _Spread(one * (1 - one), *(both - one**2 for both in pairs.chosen))
    idle, idle_both = (1 - one) ** tokens, [(1 - 2 * one + p) ** tokens for p in pairs.chosen]
    active = _Spread(idle * (1 - idle), *(both - idle**2 for both in idle_both))
    reached = max(pairs.least, most_of(parts, experts, pairs.apart(active)))
    most = max(pairs.least, most_of(parts, choices, tokens * pairs.apart(chosen)))
    here = tokens * min(k, each)  # what may be on one rank
    return Busiest(min(reached, each, here), min(most, here))


def most_of(count: int, mean: float, variance: float) -> float:
    """The expected maximum of `count` independent variables of Panjer's class: binomial, Poisson or
    negative binomial. Their probabilities have p(n) / p(n - 1) = a + b / n. mean: above 0."""
    if variance <= mean * _TAIL:
        return mean
    a = 1 - mean / variance
    b = mean - a * (mean + 1)
    middle = int(mean)
    up, down = _weights(a, b, middle, 1), _weights(a, b, middle, -1)
    first, weights = middle - len(down), [*reversed(down), 1.0, *up]
    total = sum(weights)
    below = (min(1.0, part / total) for part in accumulate(weights))
    return first + sum(1 - share**count for share in below)


def _weights(a: float, b: float, at: int, step: int) -> list[float]:
    """How many times as likely as `at` each count beyond it is, down to 0 or up."""
    found, weight = list[float](), 1.0
    while weight > _TAIL and (at or step > 0):
        ratio = a + b / (at + (step > 0))
        if ratio <= 0:
            break
        weight *= ratio**step
        found.append(weight)
        at += step
    return found


def of_the_busiest(work: OpWork, sizes: Sizes, tokens: int) -> OpWork:
    """The work of a call of routed experts on the busiest rank, from that of a mean one. Slots of
    shared experts are on every rank."""
    parts = sizes.facts.ranks.get("ep", 1)
    if sizes.routing is None or parts == 1 or not tokens:
        return work
    routing = replace(sizes.routing, shared=0)
    shared = sizes.facts.shape[0] - routing.num_experts // parts
    most = busiest_rank(routing, parts, tokens)
    reached = distinct_experts(routing.num_experts, routing.top_k, tokens) / parts + shared
    choices, slots = tokens * routing.top_k / parts, tokens * shared / parts
    return replace(
        work,
        weights=work.weights * (most.experts + shared) / reached,
        flops=work.flops * (most.choices + slots) / (choices + slots),
    )


@dataclass(frozen=True, slots=True)
class _Spread:
    """Of a variable of each expert: its variance, and the covariance of two experts of one group
    (alike) and of two groups (other)."""

    variance: float
    alike: float
    other: float


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Ordered pairs of experts. chosen: how likely a token takes both, of one group and of two.
    alike, other: how many of these pairs there are on one rank, added up over ranks. alike_of_all:
    how many of one group there are in all. least: of one token's choices, that some rank has."""

    chosen: tuple[float, float]
    least: int
    count: int
    parts: int
    alike: int
    other: int
    alike_of_all: int

    def apart(self, of: _Spread) -> float:
        """Variance of a rank's sum, less the covariance of two ranks' sums: means over ranks."""
        apart = self.alike_of_all - self.alike
        away = self.count * (self.count - 1) - self.alike - self.other - apart
        inside = self.count * of.variance + self.alike * of.alike + self.other * of.other
        outside = apart * of.alike + away * of.other
        found = inside / self.parts - outside / (self.parts * (self.parts - 1))
        return max(0.0, found)  # rounding may leave less than nothing


def _pairs(routing: Routing, parts: int) -> _Pairs:
    grouped = routing.method != "greedy" and routing.n_group > 1
    groups, kept = (routing.n_group, routing.topk_group) if grouped else (1, 1)
    count, k = routing.num_experts, routing.top_k
    size, each, within = count // groups, count // parts, count // groups * kept
    both = k * (k - 1) / (within * (within - 1)) if within > 1 else 0.0
    alike = both * kept / groups
    other = both * kept * (kept - 1) / (groups * (groups - 1)) if groups > 1 else 0.0
    held = Counter((expert // each, expert // size) for expert in range(count))
    here = sum(n * (n - 1) for n in held.values())
    spans = max(Counter(group for _, group in held).values())  # ranks that have some of a group
    least = -(-k // min(parts, kept * spans))
    away = count * (each - 1) - here
    return _Pairs((alike, other), least, count, parts, here, away, count * (size - 1))
