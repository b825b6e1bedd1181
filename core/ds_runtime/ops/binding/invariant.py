"""Which kernels `--batch-invariant` leaves: those that give a row its own bits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ds_runtime.ops.contract import Facts, Fixable, Kernel

_OUT = "leave --batch-invariant out"
NO_BITS = Fixable("a row's bits may hang on other rows: not batch-invariant", _OUT)
NO_SHARE = Fixable("serves calls of some sizes alone, whose bits no other kernel shares", _OUT)
NONE_LEFT = f"install or build what one of them lacks, or {_OUT}"


def refusals(kernel: Kernel, facts: Facts) -> Iterator[str]:
    """Why a kernel is left out."""
    if facts.own_bits:
        if not (kernel.batch_invariant and kernel.deterministic):
            yield NO_BITS
        if kernel.rows.bounded and not kernel.bits:
            yield NO_SHARE


def left(op: str, said: Sequence[str]) -> list[str]:
    """What is said where no kernel of an op is: "kernel: why" of those that only lack something."""
    lacking = [why for why in said if not why.endswith(NO_BITS)]
    return [*(lacking or [f"no kernel of {op} is batch-invariant"]), NONE_LEFT]


def alone(said: Iterable[str]) -> bool:
    """Whether a kernel is left out by these of its refusals, and nothing else."""
    why = {*said}
    return bool(why) and why <= {NO_BITS, NO_SHARE}


def alike(accepted: Sequence[Kernel]) -> list[Kernel]:
    """The best kernel with those that give rows the same bits."""
    best = accepted[0]
    return [k for k in accepted if k is best or (k.bits and k.bits == best.bits)]
