"""What a kernel cannot do or does not declare must be refused, and what it declares be true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import (
    RANK_PORTABLE,
    DeviceInfo,
    Dims,
    Facts,
    Kernel,
    Offers,
    load_attr,
)
from ds_runtime.ops.reference.cases import Case
from ds_runtime_kit.checks.conformance import CaseResult, cases_for, check_case, facts_for

ELSEWHERE = DeviceInfo("elsewhere", "a device that nobody knows", "unknown")
# Nobody has these together: a kernel must do them right, or say that it does not.
ODD_DIMS = Dims(
    {"heads": 5, "qk_nope": 20, "qk_rope": 6, "v": 28, "kv_lora": 40}
    | {"index_heads": 17, "index_dim": 16, "index_topk": 5}
)


def odd_facts(kernel: Kernel, device: DeviceInfo) -> Iterator[Facts]:
    """Geometry, pages and cache dtypes off the beaten track, where the op's samples follow them."""
    if not (kernel.op.layout or kernel.op.sized):
        return
    kinds = [("bfloat16", "", 3), ("float16", "", 7)]
    if kernel.op.layout:
        kinds += [("bfloat16", "float32", 4), ("bfloat16", "float8_e5m2", 4)]
    for dtype, kv_dtype, page_size in kinds:
        yield facts_for(device, dtype, ODD_DIMS, page_size, kv_dtype)


def dishonest(
    kernel: Kernel, accepted: Iterable[Facts], device: DeviceInfo, offers: Offers
) -> Iterator[CaseResult]:
    """Every claim of the kernel that can be held against it. `accepted`: facts of all runs."""
    kinds = list(accepted)
    yield _said(kernel, "a device that nobody knows", _foreign(kernel, kinds))
    yield _said(kernel, "refuse answers alike", _fickle(kernel, kinds))
    yield _said(kernel, "formats that it declares", _unused(kernel, kinds))
    yield from _undeclared_formats(kernel, kinds, offers)
    for facts in odd_facts(kernel, device):
        if not _has_layout(kernel, facts, offers):
            continue
        for _, case in cases_for((kernel,), facts):
            kinds_said = f"{facts.dtype}, cache {facts.kv_dtype}, pages of {facts.page_size}"
            ran = check_case(kernel, case, offers)
            said = ran.failure and f"accepts odd facts ({kinds_said}) and fails: {ran.failure}"
            yield replace(ran, failure=said, check="honesty")


def _has_layout(kernel: Kernel, facts: Facts, offers: Offers) -> bool:
    """Whether its layout takes this page size: the binder asks the layout, not the kernel."""
    mine = [x for x in offers.layouts if x.tag in kernel.layouts]
    if not kernel.op.layout or not mine:
        return True
    return any(not x.page_sizes or facts.page_size in x.page_sizes for x in mine)


def _said(kernel: Kernel, case: str, failure: str, dtype: str = "any") -> CaseResult:
    return CaseResult(kernel.name, kernel.op.name, case, dtype, failure=failure, check="honesty")


def _samples(kernel: Kernel, facts: Facts) -> Sequence[Case]:
    return list(load_attr(kernel.op.samples)(facts))


def _foreign(kernel: Kernel, kinds: Sequence[Facts]) -> str:
    if kernel.rank <= RANK_PORTABLE:
        return ""
    for facts in kinds:
        there = replace(facts, device=ELSEWHERE)
        if any(refusal(kernel, case.facts) is None for case in _samples(kernel, there)):
            return (
                f"is above portable (rank {kernel.rank}) and accepts a device of type "
                f"{ELSEWHERE.type!r}: refuse what the kernel was not made for"
            )
    return ""


def _fickle(kernel: Kernel, kinds: Sequence[Facts]) -> str:
    for facts in kinds:
        for case in _samples(kernel, facts):
            first, second = (refusal(kernel, case.facts) for _ in range(2))
            if first != second:
                return f"refuses once {first!r} and once {second!r} for the same facts"
            if first is not None and first.startswith("its refuse() "):
                return first
    return ""


def _unused(kernel: Kernel, kinds: Sequence[Facts]) -> str:
    if not kernel.op.owns_weights:
        extra = ", ".join(sorted(kernel.formats))
        return f"declares formats ({extra}), but {kernel.op.name} owns no weight" if extra else ""
    taken = {case.facts.weight_format for facts in kinds for _, case in cases_for((kernel,), facts)}
    sampled = {c.facts.weight_format for facts in kinds[:1] for c in _samples(kernel, facts)}
    missing = sorted((kernel.formats & sampled) - taken)
    if taken and missing:
        return f"declares {', '.join(missing)} and accepts no weight of it"
    return ""


def _undeclared_formats(
    kernel: Kernel, kinds: Sequence[Facts], offers: Offers
) -> Iterator[CaseResult]:
    """What reaches `pack` by another way than the binder is refused or right, never garbage."""
    if not kernel.op.owns_weights or not kinds:
        return
    seen = set(kernel.formats)
    for case in _samples(kernel, kinds[0]):
        fmt = case.facts.weight_format
        claiming = replace(kernel, formats=kernel.formats | {fmt})
        if fmt in seen or refusal(claiming, case.facts) is not None:
            continue
        seen.add(fmt)
        refused = _Refusing()
        ran = check_case(kernel, case, offers, refused.around)
        wrong = "" if refused.raised else ran.failure
        said = f"does not declare {fmt}, packs it, and is wrong: raise TypeError in pack; {wrong}"
        failure = said if wrong else ""
        yield _said(kernel, f"pack of {fmt}", failure, case.facts.dtype)


class _Refusing:
    """Sees whether `pack` raises."""

    def __init__(self) -> None:
        self.raised = False
        self._target: Any = None

    def around(self, target: Any) -> Any:
        """Stand in for this kernel object."""
        self._target = target
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def pack(self, *args: Any) -> Any:
        """See Linear.pack."""
        try:
            return self._target.pack(*args)
        except Exception:
            self.raised = True
            raise
