"""Kernels under capture: a replay with new inputs gives the bits of a call with those inputs.

Runs an op's samples on any graph backend: a device's own, or the recorder in `replay.py`, which
sees kernels in torch alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import Facts, Kernel, Offers, load_attr, load_kernel
from ds_runtime.ops.reference.cases import Call, Case, Saved
from ds_runtime.platform.contract import GraphBackend
from ds_runtime_kit.checks.conformance import CaseResult
from ds_runtime_kit.checks.effects import same_bits
from ds_runtime_kit.checks.inputs import CacheCodec, for_kernel
from ds_runtime_kit.checks.memory import allocated
from ds_runtime_kit.checks.numerics import copy_strided
from ds_runtime_kit.checks.replay import ReplayBackend

_ONCE = frozenset({"pack", "state", "prepare"})  # methods that run outside captures, if they can


def check_captures(
    kernel: Kernel, facts: Facts, backend: GraphBackend, offers: Offers | None = None
) -> list[CaseResult]:
    """Every sample that the kernel accepts where its calls are captured."""
    results = []
    for case in load_attr(kernel.op.samples)(replace(facts, graph_capture=True)):
        if refusal(kernel, case.facts) is None:
            failure = _failure(kernel, case, backend, offers or Offers())
            about = (kernel.name, kernel.op.name, case.label, facts.dtype)
            results.append(CaseResult(*about, failure=failure))
    return results


@torch.inference_mode()
def _failure(kernel: Kernel, case: Case, backend: GraphBackend, offers: Offers) -> str:
    device = torch.device(case.facts.device.type)
    try:
        codec = CacheCodec.of(kernel, case.facts, device, offers)
        target, saved, steps = load_kernel(kernel), dict[str, Any](), _Steps()
        if kernel.op.kind == "object":
            target = target(case.facts)
        for i, call in enumerate(case.calls):
            args = tuple(
                saved[a.name] if isinstance(a, Saved) else for_kernel(a, device, codec.encode)
                for a in call.args
            )
            if call.left_out(target, args):
                continue
            function = getattr(target, call.method) if call.method else target
            if call.raises is not None:
                continue
            if call.method in _ONCE or call.save:
                saved[call.save] = function(*args)
                steps.see(call.method, args)
            elif said := _replays(
                kernel.op.defined, steps.prepared(target, call, function, args), args, call,
                backend, steps.other(target, call, args), device,
            ):  # fmt: skip
                return f"call {i} ({call.method or kernel.op.name}): {said}"
    except Exception:  # whatever a kernel raises is its result
        return "raised\n" + traceback.format_exc()
    return ""


class _Steps:
    """Step states: a capture must serve the next step, which has other lengths. Kernels that
    prepare on the device do so in the capture, over tensors that the next step changes in place.
    """

    def __init__(self) -> None:
        self._limits: Any = None
        self._batch: Any = None

    def see(self, method: str, args: tuple[Any, ...]) -> None:
        """Remember what states were made with."""
        if method == "state":
            (self._limits,) = args
        elif method == "prepare":
            self._batch = args[1]

    def prepared(
        self, target: Any, call: Call, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """The function, behind what prepares its state if that is captured, too."""
        if call.method != "run" or not _prepares_on_device(target) or self._batch is None:
            return function
        held = self._batch.decode
        if held is not None:
            held = replace(held, kv_lens=held.kv_lens.clone(), page_table=held.page_table.clone())
        batch = self._batch = replace(self._batch, decode=held)
        target.prepare(args[0], batch)

        def both(state: Any, *others: Any) -> Any:
            if state is args[0]:
                target.prepare(state, batch)
            return function(state, *others)

        return both

    def other(
        self, target: Any, call: Call, args: tuple[Any, ...]
    ) -> Callable[[], tuple[Any, ...]] | None:
        """Prepares the captured state for another step; gives a fresh state prepared alike."""
        if call.method != "run" or self._batch is None or self._batch.decode is None:
            return None
        part = self._batch.decode
        rows = part.q_lens or (1,) * part.size
        lens = tuple(
            max(n, (length + 1) // 2) for n, length in zip(rows, part.host_kv_lens, strict=True)
        )
        device_lens = torch.tensor(lens, dtype=torch.int32, device=part.kv_lens.device)
        decode = replace(
            part, kv_lens=device_lens, host_kv_lens=lens, page_table=part.page_table.flip(0)
        )
        batch = replace(self._batch, decode=decode)

        def prepare() -> tuple[Any, ...]:
            fresh = target.state(self._limits)
            target.prepare(fresh, batch)
            if _prepares_on_device(target):
                part.kv_lens.copy_(device_lens)
                part.page_table.copy_(decode.page_table)
            else:
                target.prepare(args[0], batch)
            return (fresh,)

        return prepare


def _prepares_on_device(target: Any) -> bool:
    return bool(getattr(target, "prepares_on_device", False))


def _replays(
    defined: Callable[..., Tensor] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    call: Call,
    backend: GraphBackend,
    next_step: Callable[[], tuple[Any, ...]] | None,
    device: torch.device,
) -> str:
    """Capture one call, change its inputs in place, replay, and compare with a plain call."""
    results: list[Tensor] = []

    def run() -> None:
        results[:] = _tensors(function(*args))

    run()  # compiles what there is to compile
    replay = backend.capture(run)
    captured = list(results)
    for tensor in _tensors(args):
        _change(tensor)
    copies = tuple(copy_strided(a, a.device, a.dtype) if isinstance(a, Tensor) else a for a in args)
    if next_step is not None:
        copies = (*next_step(), *copies[1:])
    wanted = [t.clone() for t in _tensors(function(*copies))]
    for tensor in captured:
        if not any(_shares(tensor, a) for a in _tensors(args)):
            _poison(tensor)
    replay()
    written = [(args[i], copies[i]) for i in call.written]
    if defined is not None:
        captured, wanted = ([defined(args, t) for t in each] for each in (captured, wanted))
    pairs = [*zip(captured, wanted, strict=True), *written]
    if not all(same_bits(a, b) for a, b in pairs):
        seen_by = " (recorded were torch's ops alone)" if isinstance(backend, ReplayBackend) else ""
        return f"a replay gives other bits than a call{seen_by}"
    _, seen = allocated(replay, device)
    return f"a replay allocates {seen.kept} bytes that stay" if seen.kept > 0 else ""


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, Tensor):
            yield value


def _change(tensor: Tensor) -> None:
    """Other numbers, exactly representable; NaN and infinity stay where they are."""
    if tensor.is_floating_point():
        tensor.copy_((tensor.to(torch.float64) * -0.5).to(tensor.dtype))


def _poison(tensor: Tensor) -> None:
    if tensor.numel():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
