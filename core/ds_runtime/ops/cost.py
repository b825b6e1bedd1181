"""What a call of an op moves and computes, as its declaration says it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class OpWork:
    """Bytes and FLOPs of one call. weights, cached: bytes read of these; reads: of all else."""

    weights: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    flops: float = 0.0
    cached: float = 0.0

    @property
    def nbytes(self) -> float:
        """All bytes moved."""
        return self.weights + self.reads + self.writes + self.cached

    def __add__(self, other: OpWork) -> OpWork:
        return OpWork(
            self.weights + other.weights,
            self.reads + other.reads,
            self.writes + other.writes,
            self.flops + other.flops,
            self.cached + other.cached,
        )

    def times(self, n: float) -> OpWork:
        """The work of n such calls."""
        each = (self.weights, self.reads, self.writes, self.flops, self.cached)
        return OpWork(*(n * value for value in each))


@dataclass(frozen=True, slots=True)
class Cost:
    """How an op is timed, and what a call must move and compute.

    calls: by method, "" for a function: the arguments but for `packed` and `state`, made by a
    `TrueInputs` for so many tokens, and the work, of `Sizes` for so many tokens.
    step: the methods whose weights or cached tokens a decode step must read. source: what `pack`
    gets, where that is not one weight or a layer's experts. size: in words, what a token is where
    sites do not say it. by_width: rows have one width, which `Sizes` says. float32: computes in it
    whatever the dtype.
    """

    calls: Mapping[str, tuple[Callable[..., tuple[Any, ...]], Callable[..., OpWork]]]
    step: tuple[str, ...] = ()
    source: Callable[..., Any] | None = None
    size: Callable[..., str] = field(default=lambda sizes: "")
    by_width: bool = False
    float32: bool = False

    def of_step(self, sizes: Any, tokens: int) -> OpWork:
        """Weights and cached tokens that a decode step must read. Activations are left out: they
        stay in caches between the ops of a step."""
        whole = [self.calls[method][1](sizes, tokens) for method in self.step]
        return OpWork(
            sum(w.weights for w in whole),
            flops=sum(w.flops for w in whole),
            cached=sum(w.cached for w in whole),
        )
