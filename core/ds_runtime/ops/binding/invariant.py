"""Which kernels `--batch-invariant` leaves: those that give a row its own bits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from ds_runtime.ops.contract import RANK_REFERENCE, Facts, Fixable, Kernel

Verdict: TypeAlias = tuple[Kernel, str | None]
"""A kernel, and why it cannot serve, or None."""

_OUT = "leave --batch-invariant out"
NO_BITS = Fixable("a row's bits may hang on other rows: not batch-invariant", _OUT)
NO_SHARE = Fixable("serves calls of some sizes alone, whose bits no other kernel shares", _OUT)
_OWN_REFUSALS = ({NO_BITS}, {NO_SHARE}, {NO_BITS, NO_SHARE})
NONE_LEFT = f"install or build what one of them lacks, or {_OUT}"

# Ops that a flag alone brings.
_WANTED = {
    "mha_decode": "--disable-mla",
    "lora_delta": "--lora and --max-loras",
}


def refusals(kernel: Kernel, facts: Facts) -> Iterator[str]:
    """Why a kernel is left out."""
    if facts.own_bits:
        if not (kernel.promises.batch_invariant and kernel.promises.deterministic):
            yield NO_BITS
        if kernel.rows.bounded and not kernel.rows.bits:
            yield NO_SHARE


def left(op: str, said: Sequence[str]) -> list[str]:
    """What is said where no kernel of an op is: "kernel: why" of those that only lack something."""
    if lacking := [why for why in said if not why.endswith(NO_BITS)]:
        return [*lacking, NONE_LEFT]
    flag = f"{_WANTED[op]} or " if op in _WANTED else ""
    remedy = f"leave {flag}--batch-invariant out" if flag else NONE_LEFT
    return [f"no kernel of {op} is batch-invariant", remedy]


def judged(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same, without those for some sizes alone where none for all sizes has their bits and
    packing: they would serve calls that they do not ask for."""
    accepted = [kernel for kernel, why in verdicts if why is None]
    whole = {(k.rows.bits, k.rows.packing) for k in accepted if not k.rows.bounded}
    lone = [k for k in accepted if k.rows.bounded and (k.rows.bits, k.rows.packing) not in whole]
    return [(k, NO_SHARE if k in lone else why) for k, why in verdicts]


def instead(verdicts: Iterable[tuple[Kernel, Iterable[str]]]) -> tuple[str, ...]:
    """Of kernels and all their refusals those better than the reference that nothing but
    --batch-invariant keeps out."""
    return tuple(
        k.name for k, said in verdicts if k.rank > RANK_REFERENCE and {*said} in _OWN_REFUSALS
    )


def alike(accepted: Sequence[Kernel]) -> list[Kernel]:
    """The best kernel with those that give rows the same bits."""
    best = accepted[0]
    return [k for k in accepted if k is best or (k.rows.bits and k.rows.bits == best.rows.bits)]
