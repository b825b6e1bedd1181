"""What a step takes: the costs of its calls and collectives, added up. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ds_runtime.assembly import room
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.result import Assembly
from ds_runtime.config.graph_sizes import graph_sizes
from ds_runtime.measured.costs import Costs
from ds_runtime.predict.calls import PricedCall, Step, arithmetic, calls, crossed

COLLECTIVES, BESIDE, HOST = "collectives", "in parallel", "waiting for the host"
BATCHES = (1, 8, 32, 64, 128, 256, 512)  # of decode steps
PROMPT = 512  # tokens of each prompt of a prefill


@dataclass(slots=True)
class Predicted:
    """seconds: of a step; by: those of each op, of `COLLECTIVES`, and less than none of what runs
    `BESIDE` others; unmeasured: kernels whose
    time is the roof's alone; nbytes: that each rank receives."""

    step: Step
    seconds: float = 0.0
    by: dict[str, float] = field(default_factory=dict)
    unmeasured: set[str] = field(default_factory=set)
    nbytes: float = 0.0

    def add(self, name: str, seconds: float) -> None:
        """More of an op."""
        self.by[name] = self.by.get(name, 0.0) + seconds


def decode(requests: int, context: int) -> Step:
    """A decode step of `requests` requests with `context` cached tokens each."""
    return Step("decode", requests, requests, context)


def prefill(tokens: int, prompt: int) -> Step:
    """A step of `tokens` tokens, in prompts of `prompt` tokens each."""
    count = max(1, tokens // prompt)
    return Step("prefill", tokens, count, 0, count)


def predict(assembly: Assembly, costs: Costs, step: Step) -> Predicted:
    """What a step takes on the device of `costs`.

    Captured: all captured calls one after the other, then those that are not. Shared experts and
    the choice of routed ones count in parallel where the platform records them so. Others: a device
    that queues takes no less than the host needs to queue its calls.
    """
    found = Predicted(step)
    platform, mesh = assembly.platform, assembly.mesh
    captured = platform.captures and not assembly.config.disable_graph and step.phase == "decode"
    filled = _filled(assembly, step) if captured else step
    queued, sides = 0, dict.fromkeys(("shared", "choice", ""), 0.0)
    for call in calls(assembly, filled):
        took = call.count * _seconds(costs, call, found, assembly.config.dtype)
        found.add(call.op, took)
        sides[call.branch] += took
        queued += 0 if captured and call.captured else call.count
    for one in crossed(assembly, filled):
        each = 0.0
        if one.kind in costs.collectives:
            each = costs.collective(one.kind, one.ranks, one.nbytes)
        else:
            found.unmeasured.add(f"{one.kind} between ranks")
            rate = assembly.device.link_bandwidth
            each = one.nbytes * (one.ranks - 1) / one.ranks / rate if rate else 0.0
        found.add(COLLECTIVES, one.count * each)
        queued += 0 if captured else one.count
    if captured and platform.branches:
        found.add(BESIDE, -min(sides["shared"], sides["choice"]))
    found.seconds = sum(found.by.values())
    if captured:
        found.seconds += costs.replay
    elif platform.asynchronous:
        waits = queued * costs.launch - found.seconds
        if waits > 0:  # the device waits for the host
            found.add(HOST, waits)
            found.seconds += waits
    if mesh.size > 1:
        rows = -(-step.rows // mesh.attn_dp)
        wire = Crossing.of(assembly).wire(assembly.model.layers, rows)
        found.nbytes = wire.row * rows * mesh.attn_dp
    return found


def _filled(assembly: Assembly, step: Step) -> Step:
    """The captured step that serves it: sequences that fill it up are computed, too."""
    groups = assembly.mesh.attn_dp
    own = -(-step.rows // groups)
    size = next((n for n in graph_sizes(assembly.config) if n >= own), own)
    return Step(step.phase, size * groups, size * groups, step.context)


def _seconds(costs: Costs, call: PricedCall, found: Predicted, dtype: str) -> float:
    names = [call.name, call.name.replace(":apply_quantized", ":apply")]
    for name in names:
        if name in costs.kernels:
            return costs.seconds(name, call.rows, call.work(call.rows))
    found.unmeasured.add(call.kernel.name)
    return costs.unmeasured(call.work(call.rows), arithmetic(call.kernel, dtype))


def said(assembly: Assembly, costs: Costs, context: int) -> list[str]:
    """Lines on what steps will take, for people."""
    missing = set[str]()
    steps = list(predictions(assembly, costs, context))
    lines = []
    for one in steps:
        missing |= one.unmeasured
    torch = costs.versions.get("torch", "an unknown version")
    lines.append(
        f"predicted from ops alone, measured on {costs.device}, {costs.date[:10]}, torch {torch}"
    )
    decoded = [one for one in steps if one.step.phase == "decode"]
    each = ", ".join(f"{one.step.rows}: {one.seconds * 1e3:.2f} ms" for one in decoded)
    lines.append(f"decode step, by requests with {context} cached tokens each: {each}")
    if not decoded:
        lines[-1] += "the KV cache has no room for one"
    for one in decoded[:: max(1, len(decoded) - 1)]:
        lines.append(f"  longest parts of {one.step.rows}, ms: {_parts(one)}")
    for one in steps[len(decoded) :]:
        rate = one.step.rows / one.seconds
        lines.append(
            f"prefill of {one.step.rows} tokens in prompts of "
            f"{one.step.rows // one.step.sequences}: {one.seconds * 1e3:.1f} ms, {rate:,.0f} "
            f"tokens/s; {_parts(one)}"
        )
    measured = {ranks for curves in costs.collectives.values() for ranks in curves}
    if assembly.mesh.size > 1 and measured and assembly.mesh.tp not in measured:
        ranks = ", ".join(map(str, sorted(measured)))
        lines.append(
            f"collectives were measured with {ranks} ranks; their times with more follow from the "
            "bytes that each rank receives"
        )
    if assembly.mesh.size > 1 and not assembly.platform.own_memory:
        lines.append("ranks share this host's cores and memory: real steps take longer than these")
    if assembly.mesh.hosts > 1:
        lines.append("collectives were measured on one machine: links to others take longer")
    if slow := sorted(name for name in missing if name.startswith("reference.")):
        lines.append(f"references take many times as long as is predicted: {', '.join(slow)}")
    between = sorted(name for name in missing if name.endswith(" between ranks"))
    if between and not assembly.device.link_bandwidth:
        lines.append(f"not measured, counted as nothing: {', '.join(between)}")
        missing -= set(between)
    if missing:
        names = ", ".join(sorted(missing))
        lines.append(f"not measured; counted with the least time that the device allows: {names}")
    return lines


def predictions(assembly: Assembly, costs: Costs, context: int) -> Iterator[Predicted]:
    """Of decode steps of `BATCHES`, as many as run at once, and of a whole step of prompts."""
    most = assembly.config.max_running_requests
    if (fits := room.cached_tokens(assembly)) is not None:
        most = min(most, fits // context)
    sizes = [n for n in BATCHES if n <= most] or [n for n in (most,) if n]
    for requests in sizes:
        yield predict(assembly, costs, decode(requests, context))
    tokens = min(assembly.config.max_step_tokens, assembly.config.chunked_prefill_size)
    yield predict(assembly, costs, prefill(tokens, min(PROMPT, tokens)))


def _parts(one: Predicted) -> str:
    """The longest parts, in milliseconds."""
    parts = sorted(one.by.items(), key=lambda item: -item[1])[:5]
    return ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts)
