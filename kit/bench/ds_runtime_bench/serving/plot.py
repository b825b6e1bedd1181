"""A report's picture: a self-contained SVG, drawn without any library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ds_runtime_bench.serving.answer import Answer
from ds_runtime_bench.serving.report import TITLES, felt

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 200, 60, 60, 70
_POINTS = 400  # per curve
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}.c{fill:none;stroke:#1565c0;"
    "stroke-width:1.5}.a{stroke:#999}.g{stroke:#ddd}"
)
Points = Sequence[tuple[float, float]]


def svg(report: dict[str, Any], answers: Sequence[Answer], begin: float) -> str:
    """Distributions of the latencies, and output events and running requests over time."""
    done = [a for a in answers if a.error is None]
    all_felt = [felt(a) for a in done]
    panels = []
    for name in ("ttft", "itl", "e2el"):
        values = [getattr(one, name) for one in all_felt]
        flat = [g for gaps in values for g in gaps] if name == "itl" else values
        points = _shares(sorted(v * 1e3 for v in flat if v is not None))
        panels.append((f"{TITLES[name]} (ms): share of all below", points))
    panels.append(("running requests over seconds", _running(answers, begin)))
    title = f"{report['model']}: {report['completed']} requests in {report['duration']:.1f} s"
    width, height = 2 * (_WIDTH + _GAP) + 20, 2 * (_HEIGHT + _GAP) + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="t" x="{_LEFT}" y="22">{escape(title)}</text>'
    ]
    for number, (name, points) in enumerate(panels):
        x, y = _LEFT + number % 2 * (_WIDTH + _GAP), _TOP + number // 2 * (_HEIGHT + _GAP)
        out += _panel(name, points, x, y)
    return "".join([*out, "</svg>"])


def _shares(values: Sequence[float]) -> Points:
    """The cumulative distribution, thinned."""
    last = len(values) - 1
    kept = sorted({round(i * last / (_POINTS - 1)) for i in range(_POINTS)}) if values else []
    return [(values[i], (i + 1) / len(values)) for i in kept]


def _running(answers: Sequence[Answer], begin: float) -> Points:
    steps = sorted([(a.begin - begin, 1) for a in answers] + [(a.end - begin, -1) for a in answers])
    out, running = [(0.0, 0.0)], 0
    for at, step in steps:
        out.append((at, float(running)))
        running += step
        out.append((at, float(running)))
    return out


def _panel(title: str, points: Points, x: int, y: int) -> list[str]:
    right = max((p[0] for p in points), default=1.0) or 1.0
    top = max((p[1] for p in points), default=1.0) or 1.0
    out = [f'<text x="{x}" y="{y - 8}">{escape(title)}</text>']
    for part in (0.0, 0.5, 1.0):
        px, py = x + part * _WIDTH, y + (1 - part) * _HEIGHT
        out += [
            f'<line class="g" x1="{x}" x2="{x + _WIDTH}" y1="{py}" y2="{py}"/>',
            f'<text x="{px}" y="{y + _HEIGHT + 16}" text-anchor="middle">{part * right:.4g}</text>',
            f'<text x="{x - 6}" y="{py + 4}" text-anchor="end">{part * top:.3g}</text>',
        ]
    out.append(f'<line class="a" x1="{x}" x2="{x}" y1="{y}" y2="{y + _HEIGHT}"/>')
    path = " ".join(
        f"{x + a / right * _WIDTH:.1f},{y + (1 - b / top) * _HEIGHT:.1f}" for a, b in points
    )
    return [*out, f'<polyline class="c" points="{path}"/>'] if path else out
