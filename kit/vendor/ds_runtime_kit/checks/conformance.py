"""Conformance: every offered kernel over its op's samples, against the float64 oracle.

A plugin's tests need three lines:

    @pytest.mark.parametrize(("kernel", "case"), cases_for(my_kernels, facts), ids=case_id)
    def test_conforms(kernel, case):
        check_case(kernel, case).raise_if_failed()
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import (
    FP4_KEYS,
    FP8_GROUPS,
    DeviceInfo,
    Dims,
    Facts,
    Kernel,
    Offers,
    load_attr,
    load_kernel,
)
from ds_runtime.ops.dtypes import is_fp8
from ds_runtime.ops.reference.cases import Call, Case, PagedCache, Saved
from ds_runtime.ops.reference.judging import FP8_ROUNDING, Verdict
from ds_runtime_kit.checks.effects import (
    aliases,
    bits,
    flat,
    form_differs,
    must_raise,
    plain_written,
    poisoned_allocations,
    strayed,
    touched,
    watched,
    written_differs,
)
from ds_runtime_kit.checks.inputs import CacheCodec, for_kernel, for_oracle
from ds_runtime_kit.checks.numerics import disagreement, storage_bytes

SMALL_DIMS = Dims(
    {"heads": 3, "qk_nope": 16, "qk_rope": 8, "v": 12, "kv_lora": 32}
    | {"index_heads": 16, "index_dim": 32, "index_topk": 8}
)
TRUE_DIMS = Dims(
    {"heads": 4, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512}
    | {"index_heads": 64, "index_dim": 128, "index_topk": 2048}
)


@dataclass(frozen=True)
class CaseResult:
    """How a kernel did on one case: its worst relative error, and what is wrong, if anything.

    check: the name in `kit.CHECKS` of what was asked.
    """

    kernel: str
    op: str
    case: str
    dtype: str
    error: float = 0.0
    tolerance: float = 0.0
    failure: str = ""
    check: str = "samples"

    @property
    def ok(self) -> bool:
        return not self.failure

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the whole sentence."""
        if self.failure:
            raise AssertionError(
                f"{self.kernel} ({self.op}, {self.dtype}), case {self.case!r}: {self.failure}"
            )


def facts_for(
    device: DeviceInfo,
    dtype: str,
    dims: Dims = SMALL_DIMS,
    page_size: int = 4,
    kv_dtype: str = "",
) -> Facts:
    """Facts to run samples under, on this device in this compute dtype; both caches have
    `kv_dtype`, by default the same. Only index keys are in FP4. Threads are this process's."""
    kept = kv_dtype or dtype
    index = "float8_e4m3fn" if kept == FP8_GROUPS else kept
    kept = dtype if kept == FP4_KEYS else kept
    return Facts(
        *(device, dims, dtype),
        kv_dtype=kept,
        page_size=page_size,
        index_dtype=index,
        threads=torch.get_num_threads(),
    )


def cases_for(kernels: Iterable[Kernel], facts: Facts) -> list[tuple[Kernel, Case]]:
    """Every kernel with every sample of its op that it does not refuse."""
    return [
        (kernel, case)
        for kernel in kernels
        for case in _samples(kernel.op.samples, facts)
        if refusal(kernel, case.facts) is None
    ]


@lru_cache(maxsize=32)
def _samples(path: str, facts: Facts) -> tuple[Case, ...]:
    """The op's samples, for all its kernels: to draw them takes longer than most kernels do.

    Whatever runs gets copies of them.
    """
    return tuple(load_attr(path)(facts))


def case_id(value: Any) -> str:
    """Test ids for `cases_for`."""
    if isinstance(value, Kernel):
        return f"{value.op.name}-{value.name}"
    return f"{value.facts.dtype}-{value.label}" if isinstance(value, Case) else str(value)


def check_kernel(kernel: Kernel, facts: Facts, offers: Offers | None = None) -> list[CaseResult]:
    """The signature and every accepted sample; nothing of a kernel that accepts none is imported.

    `offers`: for kernels with an own cache layout.
    """
    if not cases_for((kernel,), facts):
        return []
    difference = signature_difference(kernel, facts)
    results = [
        CaseResult(
            kernel.name, kernel.op.name, "signature", facts.dtype, 0, 0, difference, "signature"
        )
    ]
    cases = [] if difference else cases_for((kernel,), facts)
    return results + [check_case(k, case, offers or Offers()) for k, case in cases]


def signature_difference(kernel: Kernel, facts: Facts) -> str:
    """How the kernel's parameters differ from the Protocol's, by name and order; "" if not."""
    protocol, made = load_attr(kernel.op.protocol), load_kernel(kernel)
    if kernel.op.kind == "function":
        return _parameters_differ("", protocol.__call__, made, 1)
    instance = made if inspect.isclass(made) else made(facts)
    skip = 1 if inspect.isclass(made) else 0
    for name, method in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if not callable(getattr(instance, name, None)):
            return f"has no method {name}"
        if said := _parameters_differ(name, method, getattr(instance, name), 1, skip):
            return said
    for beside in map(load_attr, kernel.op.beside):
        methods = {n: m for n, m in vars(beside).items() if not n.startswith("_")}
        if not any(hasattr(instance, name) for name in methods):
            continue
        for name, method in methods.items():
            if not hasattr(instance, name):
                return f"has no method {name}, and some of {beside.__name__}"
            if said := _parameters_differ(name, method, getattr(instance, name), 1, skip):
                return said
    return ""


def _parameters_differ(name: str, want: Any, got: Any, skip_want: int, skip_got: int = 0) -> str:
    wanted = list(inspect.signature(want).parameters)[skip_want:]
    found = list(inspect.signature(got).parameters)[skip_got:]
    if wanted == found:
        return ""
    return f"{name or 'the function'} takes ({', '.join(found)}), not ({', '.join(wanted)})"


def check_case(
    kernel: Kernel,
    case: Case,
    offers: Offers | None = None,
    around: Callable[[Any], Any] | None = None,
) -> CaseResult:
    """Run one case and compare all that its calls return and write.

    around: gets the kernel's function or object, and gives what is called in its place.
    """
    return _result(kernel, case, offers, lambda bench, bound: bench.run(bound), around)


def judge_last(kernel: Kernel, case: Case, ran: Ran, offers: Offers | None = None) -> CaseResult:
    """Compare what the case's last call did elsewhere: `ran` holds its arguments afterwards."""
    return _result(kernel, case, offers, lambda bench, bound: bench.judge_last(ran, bound))


def run_case(kernel: Kernel, case: Case, offers: Offers | None = None) -> list[Ran]:
    """Run one case on the kernel alone: what each call gave."""
    device = torch.device(case.facts.device.type)
    return _Bench(
        kernel, case, CacheCodec.of(kernel, case.facts, device, offers or Offers())
    ).made()


def _result(
    kernel: Kernel,
    case: Case,
    offers: Offers | None,
    judge: Callable[[_Bench, float], tuple[float, str]],
    around: Callable[[Any], Any] | None = None,
) -> CaseResult:
    rounded = case.facts.index_dtype if kernel.op.layout == "index" else ""
    own = rounded if rounded in kernel.op.tolerance else case.facts.dtype
    row = kernel.numerics or own
    tolerance = kernel.op.tolerance.get(row)
    about = (kernel.name, kernel.op.name, case.label, case.facts.dtype)
    if tolerance is None:
        return CaseResult(*about, failure=f"{kernel.op.name} states no tolerance for {row!r}")
    device = torch.device(case.facts.device.type)
    try:
        codec = CacheCodec.of(kernel, case.facts, device, offers or Offers())
    except LookupError as e:
        return CaseResult(*about, failure=str(e))
    error, failure = judge(_Bench(kernel, case, codec, around), tolerance)
    return CaseResult(*about, error, tolerance, failure)


@dataclass
class Ran:
    """One executed call: arguments as they are afterwards, and what came of it."""

    args: tuple[Any, ...]
    results: list[Tensor]
    touched: str = ""
    left_out: bool = False


def _agree(
    args: Sequence[Any], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float
) -> Verdict:
    """Of a contract without freedom: each result by itself."""
    worst = 0.0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error, failure = disagreement(a, b, tolerance)
        if failure:
            return error, f"result {i}: {failure}"
        worst = max(worst, error)
    return worst, ""


class _Bench:
    """One case on one kernel: runs kernel, oracle and native reference, then compares."""

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        codec: CacheCodec,
        around: Callable[[Any], Any] | None = None,
    ) -> None:
        self.kernel = kernel
        self.case = case
        self.codec = codec
        self.around = around

    def made(self) -> list[Ran]:
        """What the kernel does, call by call."""
        return list(self._run_kernel())

    def judge_last(self, ran: Ran, tolerance: float) -> tuple[float, str]:
        """(worst relative error, what is wrong) of the last call, run elsewhere."""
        wide, native = self._oracles()
        return self._judge(self.case.calls[-1], ran, wide[-1], native[-1], tolerance)

    def _oracles(self) -> tuple[list[Ran], list[Ran]]:
        """The reference's calls, in float64 and in the dtypes of the case."""
        case, reference = self.case, load_attr(self.kernel.op.reference)
        host = CacheCodec(case.facts, torch.device("cpu"), role=self.codec.role)
        wide = list(self._execute(reference, lambda v: for_oracle(v, self.codec.seen)))
        native = list(self._execute(reference, lambda v: for_kernel(v, host.device, host.encode)))
        return wide, native

    def run(self, tolerance: float) -> tuple[float, str]:
        """(worst relative error, what is wrong)."""
        case = self.case
        wide, native = self._oracles()
        runs = 2 if self.kernel.promises.deterministic else 1
        try:
            made = [self.made() for _ in range(runs)]
        except Exception:  # whatever a kernel raises is its result
            return float("inf"), "raised\n" + traceback.format_exc()
        worst = 0.0
        for i, call in enumerate(case.calls):
            where = f"call {i} ({call.method or self.kernel.op.name}): "
            error, failure = self._judge(call, made[0][i], wide[i], native[i], tolerance)
            if failure:
                return error, where + failure
            worst = max(worst, error)
            again = [*made[-1][i].results, *plain_written(call, made[-1][i].args)]
            first = [*made[0][i].results, *plain_written(call, made[0][i].args)]
            same = (torch.equal(bits(a), bits(b)) for a, b in zip(first, again,
                                                                    strict=True))  # fmt: skip
            if not all(same):
                return worst, where + "declared deterministic, but two runs differ"
        return worst, ""

    def _run_kernel(self) -> Iterator[Ran]:
        target = load_kernel(self.kernel)
        with poisoned_allocations():
            yield from self._execute(
                target, lambda v: for_kernel(v, self.codec.device, self.codec.encode), watch=True
            )

    def _execute(self, target: Any, convert: Any, watch: bool = False) -> Iterator[Ran]:
        saved: dict[str, Any] = {}
        if self.kernel.op.kind == "object":
            target = target(convert(self.case.facts))
        if watch and self.around is not None:
            target = self.around(target)
        for call in self.case.calls:
            args = tuple(saved[a.name] if isinstance(a, Saved) else convert(a) for a in call.args)
            if watch and call.left_out(target, args):
                yield Ran((), [], left_out=True)
                continue
            function = getattr(target, call.method) if call.method else target
            before = watched(call, args) if watch else {}
            inside = [(a, storage_bytes(a), a.clone()) for a in plain_written(call, args)]
            if call.raises is not None:
                yield Ran(args, [], must_raise(function, args, call.raises))
                continue
            result = function(*args)
            if call.save:
                saved[call.save] = result
                yield Ran(args, [])
                continue
            results = [r for r in flat(result) if r is not None]
            wrong = touched(before, args) or aliases(call, args, results)
            yield Ran(args, results, wrong or (strayed(inside) if watch else ""))

    def _judge(
        self, call: Call, ran: Ran, wide: Ran, native: Ran, tolerance: float
    ) -> tuple[float, str]:
        if ran.left_out:
            return 0.0, ""
        if ran.touched:
            return float("inf"), ran.touched
        if len(ran.results) != len(native.results):
            return float("inf"), f"returns {len(ran.results)} values, not {len(native.results)}"
        for i, (got, want) in enumerate(zip(ran.results, native.results, strict=True)):
            if said := form_differs(got, want, self.kernel.op.contiguous):
                return float("inf"), f"result {i}: {said}"
        error, failure = 0.0, ""
        if ran.results:
            judge = self.kernel.op.judge or _agree
            error, failure = judge(wide.args, ran.results, wide.results, tolerance)
        for index in call.written:
            if not failure:
                cache = call.args[index]
                if isinstance(cache, Tensor):
                    got, want = ran.args[index], wide.args[index]
                    failure = written_differs(cache, got.to("cpu"), want, tolerance, "result")
                    continue
                assert isinstance(cache, PagedCache)
                got = self.codec.decode(ran.args[index], cache.page_size)
                want = wide.args[index].flatten(0, 1)
                if self.codec.rounds or (tolerance and is_fp8(got.dtype)):
                    tolerance = max(tolerance, FP8_ROUNDING)
                failure = written_differs(self.codec.seen(cache), got, want, tolerance)
        return error, failure
