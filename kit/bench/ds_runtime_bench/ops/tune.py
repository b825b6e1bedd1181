"""Costs of a device: its ops one by one at sizes of their own, and its floors. Torch-free until
something is timed.

The models whose ops are timed are not those of any checkpoint. Their widths are DeepSeek's. Their
numbers of experts, heads and ids are smaller, so that all fits and nothing is made twice.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.measured.costs import Costs, KernelCost, Point, is_busy
from ds_runtime.ops.contract import Kernel, load_attr
from ds_runtime.ops.contracts.attention.index import scored_rows
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.table import OPS
from ds_runtime.predict.calls import APART, PROMPTS, SCORED, key
from ds_runtime.predict.places import arithmetic, serving
from ds_runtime_bench.ops.measure import Group, Measurement, groups
from ds_runtime_bench.record import environment
from ds_runtime_bench.shapes import config_of

if TYPE_CHECKING:
    from ds_runtime_bench.ops.subjects import Subject, Timed

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SHORT = (512, 4096)  # cached tokens of each sequence, where a decode step attends them
SEEN = (4096,)  # where rows choose among what they see
_DECODED, _PROMPTS = 1024, 64  # the most rows of a decode step, the fewest of a prompt
_FEW = 1 << 10  # values of the smallest op
_FLOOR_CALLS = 256
LASTING = 2.0  # seconds of calls, after which a device has lowered its clock if it does
_QUEUED = 16  # calls of which the host's time is taken, one by one
_V3 = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
_V32 = {**_V3, "vocab_size": 16384}


@dataclass(frozen=True, slots=True)
class Geometry:
    """A named shape, what is other in it, settings of the engine, and the ops that are timed of it;
    none: all. seen: cached tokens of each sequence, where rows choose what they attend."""

    shape: str
    values: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    seen: tuple[int, ...] = SEEN


_EXPERTS = ("experts",)
_BY_NUMBER = {"tp": 4, "dp": 4, "ep": 4, "enable_dp_attention": True}
_HALF_BY_NUMBER = {"tp": 2, "dp": 2, "ep": 2, "enable_dp_attention": True}
_INDEXED = ("index_prologue", "index_select", "index_scores", "index_topk")
_SPARSE = ("sparse_prefill", "sparse_decode")
_LONG = (4096, 65536)
_WIDE = {"n_routed_experts": 64, "num_attention_heads": 64, "intermediate_size": 12288}
_NARROW = {"moe_intermediate_size": 256, "num_attention_heads": 16, "intermediate_size": 2304}
_LITE = {"num_hidden_layers": 2, "vocab_size": 25600}
LARGE = (
    Geometry("v3-slice", {**_V3, **_WIDE, "vocab_size": 40960}),
    Geometry("v3-slice", {**_V3, **_NARROW, "vocab_size": 16384}),
    Geometry("v2-lite", {**_LITE, "n_routed_experts": 32, "intermediate_size": 5504}),
    Geometry("v3-slice", _V3, _BY_NUMBER, _EXPERTS),
    Geometry("v2-lite", _LITE, _BY_NUMBER, _EXPERTS),
    Geometry("v2-lite", _LITE, _HALF_BY_NUMBER, _EXPERTS),
    # As --tp 2 cuts those of V3: as many as there are, so that each meets as many rows.
    Geometry("v3-slice", {**_V3, "moe_intermediate_size": 1024}, _BY_NUMBER, _EXPERTS),
    Geometry("v2-lite", {**_LITE, "moe_intermediate_size": 384}, {}, _EXPERTS),
    # No whole blocks, as --tp 2 cuts those of V2-Lite: other kernels multiply all rows of them.
    Geometry("v2-lite", {**_LITE, "moe_intermediate_size": 704}, {}, _EXPERTS),
    Geometry("v32-slice", {**_V32, **_WIDE}, {}, (*_INDEXED, *_SPARSE, "router_logits"), _LONG),
    Geometry("v32-slice", {**_V32, **_NARROW}, {}, _SPARSE),
)
_SMALL = {"n_routed_experts": 16, "vocab_size": 8192, "intermediate_size": 2816}
_SMALLER = {"n_routed_experts": 8, "moe_intermediate_size": 704, "hidden_size": 1024}
SMALL = (Geometry("lite-2", _SMALL), Geometry("lite-2", _SMALLER))


def geometries(shapes: Sequence[str], own_memory: bool) -> tuple[Geometry, ...]:
    """What is timed: these named shapes, or what suits a device."""
    if shapes:
        return tuple(Geometry(name) for name in shapes)
    return LARGE if own_memory else SMALL


def assembled(
    config: EngineConfig, explicit: Iterable[str], geometry: Geometry, weights: str
) -> Assembly:
    """The assembly of a geometry, for which no checkpoint is needed."""
    name = geometry.shape
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / name
        named.mkdir()
        raw = {**config_of(name, weights), **geometry.values}
        (named / "config.json").write_text(json.dumps(raw))
        given = {"model": str(named), "load_format": "dummy", **geometry.settings}
        return assemble(with_changes(config, given), {*explicit, *given})


class Tuning:
    """Points of every kernel, geometry by geometry, on one device."""

    def __init__(self, seconds: float, rows: Sequence[int], tell: Callable[[str], None]) -> None:
        self._seconds, self._rows, self._tell = seconds, tuple(rows), tell
        self._found: dict[str, tuple[str, str, list[Point]]] = {}
        self._queues: dict[str, list[float]] = {}
        self._lasting: dict[str, float] = {}
        self._first: Measurement | None = None
        self._floors: tuple[float, float, float] | None = None

    def add(self, assembly: Assembly, only: Sequence[str] = (), seen: Sequence[int] = SEEN) -> None:
        """All of its kernels, or those of `only` these ops. seen: as in `Geometry`."""
        for context in SHORT:
            measurement = Measurement(assembly, context, None, self._seconds, self._first)
            self._first = self._first or measurement
            if context == SHORT[0] and (not only or "linear" in only):
                self._compile(measurement)
            for group in groups(assembly, only):
                attends = group.sites[0].phase == "decode" and OPS[group.op].by_sequence
                if (context == SHORT[0] or attends) and not _chooses(group):
                    self._group(measurement, group)
        for prompt in (False, True):
            self._choosing(assembly, only, seen, prompt)

    def _choosing(
        self, assembly: Assembly, only: Sequence[str], seen: Sequence[int], prompt: bool
    ) -> None:
        """Ops that choose what a row sees, or attend what was chosen: of sequences of a row each,
        or of rows of one prompt. A longer context that makes no more work is left out."""
        done = set[tuple[int, OpWork]]()
        for context in seen:
            measurement = Measurement(assembly, context, None, self._seconds, self._first, prompt)
            for number, group in enumerate(groups(assembly, only)):
                other = "decode" if prompt else "prefill"
                if not _chooses(group) or group.sites[0].phase == other:
                    continue
                ((_, of),) = OPS[group.op].cost.calls.values()  # type: ignore[union-attr]
                work = number, of(measurement.place(group, group.bound), _PROMPTS)
                if work not in done:
                    done.add(work)
                    self._group(measurement, group)

    def _compile(self, measurement: Measurement) -> None:
        """What compilers make of these kernels, in processes beside each other."""
        from ds_runtime.engine.device.precompile import Ahead
        from ds_runtime.ops.binding.bound import BoundOps

        start, assembly = time.perf_counter(), measurement.assembly
        bound, memory = BoundOps(assembly.binding), assembly.device.memory
        with Ahead(bound, measurement.device, max(self._rows), memory):
            pass
        self._tell(f"compiled in {time.perf_counter() - start:.1f} s")

    def _group(self, measurement: Measurement, group: Group) -> None:
        site = group.sites[0]
        if site.op in APART:
            return
        shares = measurement.assembly.binding.shares.get((site.op, site.layer, site.module))
        start, made = time.perf_counter(), dict[str, int]()
        alike = OPS[site.op].kind == "function" or shares is None
        kernels = shares.kernels if shares is not None and alike else (group.bound,)
        for kernel in kernels:
            try:
                timed = measurement.timed(group, kernel, None if alike else shares)
                rows = [n for n in self._rows if _fits(measurement, group, n)]
                for n, method, subject in _subjects(timed, group, rows):
                    serves = serving(shares, group.bound, method, n)
                    if not alike or serves is kernel:
                        self._point(measurement, group, serves, method, n, subject)
                        made[serves.name] = made.get(serves.name, 0) + 1
            except Exception as e:  # a kernel that fails has the points that it has
                said = (str(e).splitlines() or [""])[0]
                self._tell(f"{group.op} {group.what}: {kernel.name}: {type(e).__name__}: {said}")
        points = ", ".join(f"{name} {count}" for name, count in made.items()) or "none"
        took = time.perf_counter() - start
        self._tell(f"{group.op} {group.what}: points {points}, in {took:.1f} s")

    def _point(
        self,
        measurement: Measurement,
        group: Group,
        kernel: Kernel,
        method: str,
        rows: int,
        subject: Subject,
    ) -> None:
        spent = measurement.time(subject.calls)
        work = measurement.work(subject, kernel, group)
        dtype = arithmetic(kernel, group.facts.dtype)
        apart = measurement.prompt and _chooses(group)
        name = key(kernel, PROMPTS if apart else method)
        _, _, points = self._found.setdefault(name, (group.op, dtype, []))
        points.append(Point(rows, work.nbytes, work.flops, spent))
        if measurement.platform.asynchronous:
            self._queues.setdefault(name, []).append(queued(measurement, subject.calls))
            rate = measurement.ceilings.compute.get(dtype)
            busy = rate is not None and is_busy(work.flops, rate, spent)
            if busy and rows == max(self._rows) and name not in self._lasting:
                later = measurement.time(subject.calls, LASTING)
                self._lasting[name] = max(1.0, later / spent)

    def costs(self) -> Costs:
        """What was found, with the device's rates and floors."""
        assert self._first is not None, "nothing was added"
        assembly, here = self._first.assembly, environment()
        self._floors = self._floors or floors(self._first)
        floor, launch, replay = self._floors
        device = assembly.device
        return Costs(
            device.name,
            device.arch,
            here["time"],
            {**dict(assembly.plan.versions), "commit": here["commit"] or "unknown"},
            self._first.ceilings.bandwidth,
            dict(self._first.ceilings.compute),
            floor,
            launch,
            replay,
            {
                name: KernelCost(
                    op,
                    dtype,
                    tuple(points),
                    statistics.median(self._queues[name]) if name in self._queues else None,
                    self._lasting.get(name),
                )
                for name, (op, dtype, points) in sorted(self._found.items())
            },
        )


def _chooses(group: Group) -> bool:
    cost = OPS[group.op].cost
    return cost is not None and cost.chooses


def _fits(measurement: Measurement, group: Group, rows: int) -> bool:
    """Whether a step may have a call of so many rows."""
    phase, sampled = group.sites[0].phase, not group.sites[0].captured
    if _chooses(group):
        new = rows if measurement.prompt else 0
        if group.op in SCORED and rows > scored_rows(measurement.context + new):
            return False
        return rows >= _PROMPTS if measurement.prompt else rows <= _DECODED
    if phase == "decode" or sampled:
        return rows <= _DECODED
    return phase == "any" or rows >= _PROMPTS


def _subjects(
    timed: Timed, group: Group, rows: Sequence[int]
) -> Iterator[tuple[int, str, Subject]]:
    """(rows, method, subject) of each method that the op's cost has, and of codes where the kernel
    takes them."""
    methods = tuple(timed.cost.calls)
    for n in rows:
        for method, subject in zip(methods, timed.at(n), strict=True):
            yield n, method, subject
            coded = _coded(timed, n, subject) if group.op == "linear" else None
            if coded is not None:
                yield n, "apply_quantized", coded


def _coded(timed: Timed, rows: int, plain: Subject) -> Subject | None:
    """The same of activations that come as codes; None where the kernel takes none."""
    import torch

    kernel: Any = timed.kernel
    groups = kernel.quantizes(rows, timed.packed[0]) if hasattr(kernel, "quantizes") else None
    if groups is None:
        return None
    given = plain.calls[0].args  # type: ignore[attr-defined]
    x = next(a for a in given if isinstance(a, torch.Tensor))
    q, scale = load_attr(OPS["quantize_group"].reference)(x, *groups)
    codes = q, scale.T.contiguous().T  # in columns, as fused kernels write them

    def call(packed: Any) -> Callable[[], Any]:
        return lambda: kernel.apply_quantized(*codes, packed)

    return replace(plain, calls=[call(packed) for packed in timed.packed])


def queued(measurement: Measurement, calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds in which the host queues a call, to a device that waits for it."""
    times = []
    for n in range(_QUEUED):
        measurement.platform.synchronize()
        start = time.perf_counter()
        calls[n % len(calls)]()
        times.append(time.perf_counter() - start)
    measurement.platform.synchronize()
    return statistics.median(times)


def floors(measurement: Measurement) -> tuple[float, float, float]:
    """Seconds of the smallest op in a captured step; of one that the host queues; of a captured
    step of one op. Where nothing is captured, the last is the second."""
    import torch

    platform = measurement.platform
    x = torch.ones(_FEW, device=measurement.device)

    def call() -> Any:
        return x.add_(1.0)

    def many() -> None:
        for _ in range(_FLOOR_CALLS):
            call()

    def best(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            run()
            platform.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    many()
    platform.synchronize()
    launch = best(many) / _FLOOR_CALLS
    if not (platform.asynchronous and platform.captures):
        return launch, launch, launch
    graphs = platform.graph_backend(0)
    return best(graphs.capture(many)) / _FLOOR_CALLS, launch, best(graphs.capture(call))
