"""What ops and collectives take on a device, as `ds-runtime tune` measured them. Torch-free.

A `Costs` holds measured points alone. What was not measured follows from the points next to it.
Between two sizes it is a straight line over the roof, the least time that the device's rates allow.
Between two numbers of rows it is a power (of routed experts: of rows that meet a weight, as experts
differ in number). Nothing here was fitted to a step.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ds_runtime.errors import ConfigError, unreadable, unwritable
from ds_runtime.measured import fields as of
from ds_runtime.ops.declare import OpWork
from ds_runtime.parallel.sums.kinds import INSTEAD

FORMAT = 1
# Of collectives.
KINDS = ("all_reduce", "gather_rows", "reduce_scatter", "all_gather", *INSTEAD)
_ROUTED = {"experts", "experts_limited"}
_FAR = 4.0  # times the load, from which a point says little
_BUSY = 0.3  # of the fastest matmul's rate
_LEAST = 1e-9  # seconds: less is not measured
_RATES = ("bandwidth", "floor", "launch", "replay")
_MOST = 1 << 50  # of rows, ranks and bytes in a file: more is no measurement
_EXTRA = ("queue", "lasting")  # fields of a kernel that older files lack
_COUNT = re.compile(r"[1-9][0-9]{0,15}")


@dataclass(frozen=True, slots=True)
class Point:
    """One timed call: its rows, what it must move and compute, and its median seconds."""

    rows: int
    nbytes: float
    flops: float
    seconds: float


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Points of one method of a kernel, place by place, rows rising at each. arithmetic: the dtype
    in which it multiplies. queue: seconds in which the host queues a call; None: not measured.
    lasting: how many times as long a call takes after seconds of such calls, under which a device
    lowers its clock; None: not measured."""

    op: str
    arithmetic: str
    points: tuple[Point, ...]
    queue: float | None = None
    lasting: float | None = None


Collective = Mapping[int, tuple[tuple[int, float], ...]]
"""By number of ranks: (bytes of the whole, seconds), rising."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one device.

    bandwidth: bytes per second of the fastest reading; compute: operations per second of the
    fastest matmul by dtype. floor: seconds of the smallest op in a captured step; launch: of one
    that the host queues by itself; replay: from the start of a captured step of one op to its end.
    kernels: by "kernel:method". collectives: by kind, of `KINDS`. host: (requests, seconds) of what
    the engine does on the host for a decode step, requests rising; empty: not measured.
    """

    device: str
    arch: str
    date: str
    versions: Mapping[str, str]
    bandwidth: float
    compute: Mapping[str, float]
    floor: float
    launch: float
    replay: float
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    host: tuple[tuple[int, float], ...] = ()

    def on_the_host(self, requests: int) -> float:
        """Seconds of the engine's own work for a decode step: straight between two numbers of
        requests, and beyond the last in proportion. 0 where none was measured."""
        if not self.host:
            return 0.0
        return _on([(float(n), seconds) for n, seconds in self.host], float(requests), 0.0)

    def multiplies(self, work: OpWork, arithmetic: str, seconds: float) -> bool:
        """Whether a call that takes `seconds` keeps the device's multipliers busy."""
        rate = self.compute.get(arithmetic)
        return rate is not None and is_busy(work.flops, rate, seconds)

    def roof(self, work: OpWork, arithmetic: str) -> float:
        """The least seconds of a call, by the device's rates; those of a dtype that was not
        measured count as those of the slowest that was."""
        rate = self.compute.get(arithmetic) or min(self.compute.values(), default=math.inf)
        return max(work.nbytes / self.bandwidth, work.flops / rate)

    def seconds(self, name: str, rows: int, work: OpWork) -> float:
        """Of a call of "kernel:method" with `rows` rows that must do this work. KeyError for what
        was not measured."""
        cost = self.kernels[name]
        load, roof = _load(cost.op, rows, work), self.roof(work, cost.arithmetic)
        found = [self._at(cost, series, load) for series in _series(cost.points)]
        near = [(at, seconds) for at, seconds, far in found if not far]
        return _on(_means(near or [(at, s) for at, s, _ in found]), roof, self.floor)

    def is_far(self, name: str, rows: int, work: OpWork) -> bool:
        """Whether a call of "kernel:method" is far above all that was measured of it, by its
        rows, or by the rows that meet a weight. KeyError for what was not measured."""
        cost = self.kernels[name]
        done = ((p.rows, OpWork(reads=p.nbytes, flops=p.flops)) for p in cost.points)
        return _load(cost.op, rows, work) > _FAR * max(_load(cost.op, *one) for one in done)

    def unmeasured(self, work: OpWork, arithmetic: str) -> float:
        """Of a call of a kernel that has no points: its roof, and no less than the smallest op."""
        return max(self.floor, self.roof(work, arithmetic))

    def _at(
        self, cost: KernelCost, series: Sequence[Point], load: float
    ) -> tuple[float, float, bool]:
        """(roof, seconds) of a series at a load, and whether none of its points is near."""
        points = []
        for p in series:
            work = OpWork(reads=p.nbytes, flops=p.flops)
            at = _load(cost.op, p.rows, work)
            points.append((at, self.roof(work, cost.arithmetic), p.seconds))
        points.sort()
        at = bisect_left([one for one, *_ in points], load)
        below, above = points[max(0, at - 1)], points[min(at, len(points) - 1)]
        if at == 0:
            below = above
        if above[0] == load or below == above or below[0] == above[0]:
            one = above if above[0] == load or at < len(points) else below
            return one[1], one[2], max(load / one[0], one[0] / load) > _FAR
        share = math.log(load / below[0]) / math.log(above[0] / below[0])
        roof = below[1] ** (1 - share) * above[1] ** share
        seconds = below[2] ** (1 - share) * above[2] ** share
        return roof, seconds, above[0] / below[0] > _FAR**2

    def collective(self, kind: str, ranks: int, nbytes: float) -> float:
        """Of a collective, `nbytes` being those of the whole: what is summed, or what is gathered.

        Ranks that were not measured: those of the nearest number, with as many bytes as make each
        rank receive the same. KeyError where the kind was measured with none.
        """
        by_ranks = self.collectives[kind]
        near = min(by_ranks, key=lambda n: (abs(math.log(n / ranks)), n))
        same = nbytes * ((ranks - 1) / ranks) / ((near - 1) / near)
        curve = [(float(size), seconds) for size, seconds in by_ranks[near]]
        return _on(curve, same, curve[0][1])

    def with_kernels(self, found: Mapping[str, KernelCost]) -> Costs:
        """The same with these points. They take the place of those of the same rows, bytes and
        FLOPs; all others stay. Raises ConfigError if a kernel multiplied in another dtype."""
        merged = dict(self.kernels)
        for name, new in found.items():
            old = self.kernels.get(name, replace(new, points=()))
            if old.arithmetic != new.arithmetic:
                raise ConfigError(
                    f"costs of {name}: multiply in {old.arithmetic}, and the new ones in "
                    f"{new.arithmetic}; give --out FILE, and no --add"
                )
            again = set(map(_size, new.points))
            kept = [[p for p in s if _size(p) not in again] for s in _series(old.points)]
            # First rows fall, so that no place reads as the rest of the one before it.
            every = sorted((*filter(None, kept), *_series(new.points)), key=lambda s: -s[0].rows)
            merged[name] = replace(
                new,
                points=tuple(p for s in every for p in s),
                queue=old.queue if new.queue is None else new.queue,
                lasting=old.lasting if new.lasting is None else new.lasting,
            )
        return replace(self, kernels=dict(sorted(merged.items())))

    def with_collectives(self, found: Mapping[str, Collective]) -> Costs:
        """The same with these, which take the place of those of the same kind and ranks."""
        merged = {
            kind: {**self.collectives.get(kind, {}), **found.get(kind, {})}
            for kind in dict.fromkeys((*self.collectives, *found))
        }
        return replace(self, collectives=merged)

    def without_sums(self, ranks: int) -> Costs:
        """The same without the fast kinds of this number of ranks."""
        kept = {
            kind: {n: curve for n, curve in by.items() if kind not in INSTEAD or n != ranks}
            for kind, by in self.collectives.items()
        }
        return replace(self, collectives={kind: by for kind, by in kept.items() if by})

    def write(self, path: Path) -> None:
        """As JSON. Raises ConfigError where that cannot be written."""
        text, path = json.dumps(_packed(self), indent=1), Path(os.path.realpath(path))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")  # engines read it when they start
            try:
                part.write_text(text + "\n", encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as e:
            raise unwritable(f"costs {path}", e, "a file in a folder that is yours") from e

    @staticmethod
    def read(path: Path) -> Costs:
        """Of a file that `write` made. Raises ConfigError naming it and what is wrong."""
        try:
            return Costs.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            made = "a file that ds-runtime tune costs --out FILE wrote"
            raise unreadable(f"costs {path}", e, made) from e
        except ValueError as e:
            raise ConfigError(
                f"costs {path}: {e}; remove it, and write it with ds-runtime tune costs --out "
                f"{path}"
            ) from e

    @staticmethod
    def parse(text: str) -> Costs:
        """Of the text of such a file. Raises ValueError naming the field for any other."""
        raw = _loaded(text)
        every = [f.name for f in fields(Costs)]
        of.exactly("", raw, ("format", *every), optional=("host",))
        device, arch, date = (of.text(name, raw[name]) for name in ("device", "arch", "date"))
        bandwidth, floor, launch, replay = (of.number(name, raw[name]) for name in _RATES)
        versions, compute, kernels, collectives = (
            of.mapping(name, raw[name])
            for name in ("versions", "compute", "kernels", "collectives")
        )
        if not compute:
            raise of.wrong("compute", compute, "an object with the rate of at least one dtype")
        return Costs(
            device,
            arch,
            date,
            bandwidth=bandwidth,
            floor=floor,
            launch=launch,
            replay=replay,
            versions={n: of.text(f"versions.{n}", one) for n, one in versions.items()},
            compute={n: of.number(f"compute.{n}", one) for n, one in compute.items()},
            kernels={n: _kernel(f"kernels.{n}", one) for n, one in kernels.items()},
            collectives={kind: _curves(kind, one) for kind, one in collectives.items()},
            host=_curve("host", raw["host"]) if raw.get("host") else (),
        )

    @staticmethod
    def device_in(text: str) -> str:
        """The device of such a text, whose other fields are not looked at. Raises ValueError."""
        return of.text("device", _loaded(text).get("device"))


def is_busy(flops: float, rate: float, seconds: float) -> bool:
    """Whether a call has a fair share of the rate, operations a second, of the fastest matmul."""
    return flops > _BUSY * rate * seconds


def _loaded(text: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deep for JSON of costs") from e
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"not costs of format {FORMAT}")
    return raw


def _kernel(name: str, value: Any) -> KernelCost:
    raw = of.mapping(name, value)
    of.exactly(name, raw, ("op", "arithmetic", "points", *_EXTRA), optional=_EXTRA)
    points = tuple(
        _point(f"{name}.points[{i}]", one)
        for i, one in enumerate(of.items(f"{name}.points", raw["points"]))
    )
    op, arithmetic = (of.text(f"{name}.{key}", raw[key]) for key in ("op", "arithmetic"))
    more = {n: of.number(f"{name}.{n}", raw[n]) for n in _EXTRA if raw.get(n) is not None}
    return KernelCost(op, arithmetic, points, **more)


def _point(name: str, value: Any) -> Point:
    rows, nbytes, flops, seconds = of.items(name, value, 4)
    return Point(
        of.whole(f"{name}[0]", rows, 1, _MOST),
        of.number(f"{name}[1]", nbytes, zero=True),
        of.number(f"{name}[2]", flops, zero=True),
        of.number(f"{name}[3]", seconds),
    )


def _curves(kind: str, value: Any) -> Collective:
    if kind not in KINDS:
        raise ValueError(f"unknown field collectives.{kind}: known are {', '.join(KINDS)}")
    name = f"collectives.{kind}"
    raw = of.mapping(name, value)
    if not raw:
        raise of.wrong(name, raw, "an object with times of at least one number of ranks")
    return {_ranks(name, n): _curve(f"{name}.{n}", curve) for n, curve in raw.items()}


def _ranks(name: str, text: str) -> int:
    count = int(text) if _COUNT.fullmatch(text) else None
    return of.whole(f"{name}: number of ranks", count if count is not None else text, 2, _MOST)


def _curve(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    found = list[tuple[int, float]]()
    for i, one in enumerate(of.items(name, value)):
        size, took = of.items(f"{name}[{i}]", one, 2)
        of.whole(f"{name}[{i}][0]", size, 1, _MOST)
        if found and size <= found[-1][0]:
            raise of.wrong(f"{name}[{i}][0]", size, f"above {found[-1][0]}: sizes must rise")
        found.append((size, of.number(f"{name}[{i}][1]", took)))
    return tuple(found)


def _packed(costs: Costs) -> dict[str, Any]:
    raw = asdict(costs)
    for name, cost in costs.kernels.items():
        points = [[p.rows, p.nbytes, p.flops, float(f"{p.seconds:.4g}")] for p in cost.points]
        raw["kernels"][name]["points"] = points
        for extra in _EXTRA:
            if (value := raw["kernels"][name].pop(extra)) is not None:
                raw["kernels"][name][extra] = float(f"{value:.4g}")
    return {"format": FORMAT, **raw}


def _size(point: Point) -> tuple[int, float, float]:
    return point.rows, point.nbytes, point.flops


def _series(points: Sequence[Point]) -> list[list[Point]]:
    """Points of one place each: rows rise in one, as they are measured."""
    found = list[list[Point]]()
    for point in points:
        if not found or point.rows <= found[-1][-1].rows:
            found.append([])
        found[-1].append(point)
    return found


def _load(op: str, rows: int, work: OpWork) -> float:
    """What the efficiency of a call hangs on beside its size: its rows, and of routed experts those
    that meet each weight that is read."""
    if op in _ROUTED and work.flops and work.nbytes:
        return work.flops / (2 * work.nbytes)
    return float(rows)


def _means(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(roof, seconds), rising, those of one roof as their mean."""
    found: dict[float, list[float]] = {}
    for roof, seconds in points:
        found.setdefault(roof, []).append(seconds)
    return [(roof, sum(took) / len(took)) for roof, took in sorted(found.items())]


def _scaled(seconds: float, more: float, floor: float) -> float:
    """What takes `seconds`, with so many times the work: the smallest op's part stays."""
    fixed = min(floor, seconds)
    return max(_LEAST, fixed + (seconds - fixed) * more)


def _on(curve: Sequence[tuple[float, float]], wanted: float, floor: float) -> float:
    """The seconds at `wanted` on a curve of (size, seconds): straight between two points; beyond
    them as the last or first one, scaled."""
    sizes = [size for size, _ in curve]
    at = bisect_left(sizes, wanted)
    if at < len(curve) and sizes[at] == wanted:
        return curve[at][1]
    if 0 < at < len(curve):
        (low, first), (high, last) = curve[at - 1], curve[at]
        return first + (last - first) * (wanted - low) / (high - low)
    size, seconds = curve[min(at, len(curve) - 1)]
    return _scaled(seconds, wanted / size, floor) if size else seconds
