"""The vendor kit: every check by name, over every shape and format that a kernel accepts.

`subjects` lists what is offered for a device, `check` asks one kernel one question after another.
`ds-runtime conform`, the pytest plugin and the project's own tests run these, and nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ds_runtime.ops.contract import FP4_KEYS, FP8_GROUPS, DeviceInfo, Dims, Facts, Kernel, Offers
from ds_runtime.ops.reference.cases import Case
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import GraphBackend
from ds_runtime.plugins.manager import Plugins
from ds_runtime_kit.checks import rows
from ds_runtime_kit.checks.captures import check_captures
from ds_runtime_kit.checks.codes import Coded
from ds_runtime_kit.checks.conformance import (
    SMALL_DIMS,
    TRUE_DIMS,
    CaseResult,
    cases_for,
    check_case,
    check_kernel,
    facts_for,
)
from ds_runtime_kit.checks.memory import Measured
from ds_runtime_kit.checks.refusals import dishonest
from ds_runtime_kit.checks.rewrap import weight_variants

DTYPES = ("float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"
USES_CACHE = frozenset(n for n, op in OPS.items() if op.layout)
_KV_KINDS = {"": (), "kv": (FP8, FP8_GROUPS), "index": (FP8, FP4_KEYS)}  # beside the compute dtype


@dataclass(frozen=True)
class Width:
    """Geometry to run samples under, and the ops whose kernels depend on it."""

    dims: Dims
    page_size: int
    ops: frozenset[str]


WIDTHS: Mapping[str, Width] = {
    "small": Width(SMALL_DIMS, 4, frozenset(OPS)),
    "true": Width(TRUE_DIMS, 16, frozenset(n for n, op in OPS.items() if op.layout or op.sized)),
    "wide pages": Width(TRUE_DIMS, 64, frozenset({"mla_decode"})),
    "pages of one": Width(SMALL_DIMS, 1, USES_CACHE),
}


@dataclass(frozen=True)
class Subject:
    """One kernel under one set of facts, and what else is on the table."""

    kernel: Kernel
    facts: Facts
    offers: Offers = field(default_factory=Offers)
    width: str = "small"

    def __str__(self) -> str:
        packed = self.facts.index_dtype == FP4_KEYS
        kept = self.facts.index_dtype if packed else self.facts.kv_dtype
        dtypes = "-".join(dict.fromkeys((self.facts.dtype, kept)))
        return f"{self.kernel.op.name}-{self.kernel.name}-{dtypes}-{self.width}"


def subjects(
    plugins: Plugins, device: DeviceInfo, providers: Collection[str] | None = None
) -> Iterator[Subject]:
    """Every kernel offered for the device (by some providers) under every kind of facts."""
    for name, width in WIDTHS.items():
        for dtype in DTYPES:
            for kv_dtype in (dtype, FP8, FP8_GROUPS, FP4_KEYS):
                facts = facts_for(device, dtype, width.dims, width.page_size, kv_dtype)
                offers = plugins.offers(replace(facts, batch_invariant=True))  # all that there is
                for kernel in offers.kernels:
                    if providers is not None and kernel.provider not in providers:
                        continue
                    op = kernel.op.name
                    kinds = _KV_KINDS[OPS[op].layout]
                    if op in width.ops and (kv_dtype == dtype or kv_dtype in kinds):
                        yield Subject(kernel, facts, offers, name)


def check_samples(subject: Subject) -> list[CaseResult]:
    """Signature; right within tolerance, run-to-run bits, arguments left alone: every sample."""
    return check_kernel(subject.kernel, subject.facts, subject.offers)


def check_weights(subject: Subject) -> list[CaseResult]:
    """Strided, column-major and re-wrapped weights: of each format the first sample whose rows and
    columns can be told apart."""
    first: dict[str, Case] = {}
    for _, case in cases_for((subject.kernel,), subject.facts):
        if min(case.facts.shape[-2:], default=0) > 1:
            first.setdefault(case.facts.weight_format, case)
    return [
        replace(check_case(subject.kernel, variant, subject.offers, around), check="weights")
        for case in first.values()
        for variant, around in weight_variants(case)
    ]


def check_rows(subject: Subject) -> list[CaseResult]:
    """Batch-invariance bits, where the kernel declares them or its contract asks for them."""
    kernel, found = subject.kernel, []
    if not kernel.promises.batch_invariant and not kernel.op.own_rows:
        return []
    facts = replace(subject.facts, batch_invariant=kernel.promises.batch_invariant)
    cases = cases_for((kernel,), facts)
    if cases and not rows.can_be_taken_apart(kernel.op):
        lacks = f"declares batch_invariant, and its contract knows no rows of {kernel.op.name}"
        return [_result(subject, cases[0][1], "rows", lacks)]
    for _, case in cases:
        try:
            said = rows.is_invariant(kernel, case, subject.offers)
        except Exception:
            said = "raised\n" + traceback.format_exc()
        if said is not None:
            found.append(_result(subject, case, "rows", said))
    return found


def check_memory(subject: Subject) -> list[CaseResult]:
    """Packed bytes as `nbytes` says; workspace as declared."""
    kernel, found = subject.kernel, []
    if kernel.footprint.workspace is None and not kernel.formats:
        return []
    for _, case in cases_for((kernel,), subject.facts):
        measured: list[Measured] = []

        def around(target: Any, case: Case = case, into: list[Measured] = measured) -> Any:
            into.append(Measured(kernel, case.facts, target))
            return into[-1]

        ran = check_case(kernel, case, subject.offers, around)
        said = next((m.said for m in measured if m.said), "")
        found.append(replace(ran, failure=said or ran.failure, check="memory"))
    return found


def check_codes(subject: Subject) -> list[CaseResult]:
    """Codes in place of rows give the same bits, where the kernel declares that it takes them."""
    kernel, found, made = subject.kernel, [], False
    if not kernel.promises.takes_codes:
        return []
    for _, case in cases_for((kernel,), subject.facts):
        coded: list[Coded] = []

        def around(target: Any, into: list[Coded] = coded) -> Any:
            into.append(Coded(target))
            return into[-1]

        ran = check_case(kernel, case, subject.offers, around)
        made |= any(c.made for c in coded)
        said = next((c.said for c in coded if c.said), "")
        found.append(replace(ran, failure=said or ran.failure, check="codes"))
    if found and not made:
        none = "declares takes_codes, and quantize makes none of any sample's rows"
        found.append(replace(found[-1], failure=none))
    return found


def check_capture(subject: Subject, backend: GraphBackend) -> list[CaseResult]:
    """Capture, new inputs, replay: the bits of a plain call, and nothing allocated that stays."""
    if not subject.kernel.promises.graph_safe:
        return []
    ran = check_captures(subject.kernel, subject.facts, backend, subject.offers)
    return [replace(r, check="capture") for r in ran]


def check_honesty(kernel: Kernel, all_of_it: Iterable[Subject]) -> list[CaseResult]:
    """What is not declared is refused, what is declared is true: one kernel in all its facts."""
    mine = list(all_of_it)
    offers = mine[0].offers
    return list(dishonest(kernel, [s.facts for s in mine], mine[0].facts.device, offers))


def _result(subject: Subject, case: Case, check: str, failure: str) -> CaseResult:
    kernel = subject.kernel
    return CaseResult(
        kernel.name, kernel.op.name, case.label, case.facts.dtype, failure=failure, check=check
    )


# Per kernel and facts; "capture" needs a graph backend and "honesty" all facts of a kernel.
EACH: Mapping[str, Callable[[Subject], list[CaseResult]]] = {
    "samples": check_samples,
    "weights": check_weights,
    "rows": check_rows,
    "memory": check_memory,
    "codes": check_codes,
}
CHECKS: tuple[str, ...] = (*EACH, "capture", "honesty")


def check_all(
    mine: Iterable[Subject],
    backend: GraphBackend | None = None,
    checks: Collection[str] = CHECKS,
) -> Iterator[CaseResult]:
    """All that is asked of one kernel: `mine` are its subjects. Without a backend no captures."""
    group = list(mine)
    for subject in group:
        for name, run in EACH.items():
            if name in checks:
                yield from run(subject)
        if "capture" in checks and backend is not None:
            yield from check_capture(subject, backend)
    if "honesty" in checks and group:
        yield from check_honesty(group[0].kernel, group)


def by_kernel(every: Iterable[Subject]) -> dict[tuple[str, str], list[Subject]]:
    """Subjects by (op, kernel)."""
    found: dict[tuple[str, str], list[Subject]] = {}
    for subject in every:
        key = (subject.kernel.op.name, subject.kernel.name)
        found.setdefault(key, []).append(subject)
    return found
