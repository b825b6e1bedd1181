"""What a step takes: the costs of its calls and collectives, added up. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_runtime.assembly import room
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.result import Assembly
from ds_runtime.config.graph_sizes import graph_sizes
from ds_runtime.measured.costs import Costs
from ds_runtime.parallel.sums.kinds import FAST, INSTEAD
from ds_runtime.predict.calls import PricedCall, Step, calls, crossed
from ds_runtime.predict.places import arithmetic

COLLECTIVES, BESIDE = "collectives", "in parallel"
REPLAY, HOST = "start of the recording", "waiting for the host"
BATCHES = (1, 8, 32, 64, 128, 256, 512)  # of decode steps
PROMPT = 512  # tokens of each prompt of a prefill


@dataclass(slots=True)
class Predicted:
    """seconds: of a step; by: those of each op, of `COLLECTIVES`, of the `REPLAY`, of waiting for
    the `HOST`, and less than none of what runs `BESIDE` others. nbytes: that each rank receives.

    Names of kernels: unmeasured: whose time is the roof's alone; far: of calls far above all that
    was measured of them; unqueued: of which nobody measured how long the host queues a call;
    unlasting: that multiply at a high rate, and whose time under lasting load is not known.
    """

    step: Step
    seconds: float = 0.0
    by: dict[str, float] = field(default_factory=dict)
    unmeasured: set[str] = field(default_factory=set)
    unqueued: set[str] = field(default_factory=set)
    unlasting: set[str] = field(default_factory=set)
    far: set[str] = field(default_factory=set)
    nbytes: float = 0.0

    def add(self, name: str, seconds: float) -> None:
        """More of an op."""
        self.by[name] = self.by.get(name, 0.0) + seconds


def decode(requests: int, context: int) -> Step:
    """A decode step of `requests` requests with `context` cached tokens each."""
    return Step("decode", requests, requests, context)


def prefill(tokens: int, prompt: int, context: int = 0) -> Step:
    """A step of `tokens` tokens, in prompts of `prompt` tokens each, after `context` cached ones
    of each. Where attention is dense, these are left out."""
    count = max(1, tokens // prompt)
    return Step("prefill", tokens, count, context, count)


def predict(assembly: Assembly, costs: Costs, step: Step) -> Predicted:
    """What a step takes on the device of `costs`.

    Captured: all captured calls one after the other, then those that are not. Shared experts and
    the choice of routed ones count in parallel where the platform records them so. Of prompts,
    calls that multiply at a high rate take as long as under lasting load. A device that queues
    takes no less than the host needs for the step: the engine's own work, and queueing the calls
    that are not captured. Any other waits for the engine's own work.
    """
    found = Predicted(step)
    platform, mesh = assembly.platform, assembly.mesh
    captured = platform.captures and not assembly.config.disable_graph and step.phase == "decode"
    filled = _filled(assembly, step) if captured else None
    captured, filled = filled is not None, filled or step
    own = costs.on_the_host(step.rows if step.phase == "decode" else step.sequences)
    queued, sides = 0.0, dict.fromkeys(("shared", "choice", ""), 0.0)
    for call in calls(assembly, filled):
        took = call.count * _seconds(costs, call, found, assembly.config.dtype)
        found.add(call.op, took)
        sides[call.branch] += took
        if not (captured and call.captured):
            queued += call.count * _queue(costs, call, found)
    for one in crossed(assembly, filled):
        each = 0.0
        # Older costs lack the fast kinds, which then count as the library's.
        lacked = one.kind not in costs.collectives
        kind = INSTEAD.get(one.kind, one.kind) if lacked else one.kind
        if kind in costs.collectives:
            each = costs.collective(kind, one.ranks, one.nbytes)
        else:
            found.unmeasured.add(f"{kind} between ranks")
            rate = assembly.device.link_bandwidth
            each = one.nbytes * (one.ranks - 1) / one.ranks / rate if rate else 0.0
        found.add(COLLECTIVES, one.count * each)
        queued += 0 if captured else one.count * costs.launch
    if captured and platform.branches:
        found.add(BESIDE, -min(sides["shared"], sides["choice"]))
    if captured:
        found.add(REPLAY, costs.replay)
    found.seconds = sum(found.by.values())
    # Steps are launched ahead of a device that queues: it waits for the host's rest alone.
    waits = own
    if platform.asynchronous:
        ahead, late = not assembly.config.disable_overlap_schedule, queued - found.seconds
        waits = max(0.0, own + late) if ahead else own + max(0.0, late)
    if waits > 0:
        found.add(HOST, waits)
        found.seconds += waits
    if mesh.size > 1:
        rows = -(-step.rows // mesh.attn_dp)
        wire = Crossing.of(assembly).wire(assembly.model.layers, rows)
        found.nbytes = wire.row * rows * mesh.attn_dp
    return found


def _filled(assembly: Assembly, step: Step) -> Step | None:
    """The captured step that serves it: sequences that fill it up are computed, too. None where
    none has as many, and it runs op by op."""
    groups = assembly.mesh.attn_dp
    own = -(-step.rows // groups)
    sizes = graph_sizes(assembly.config, assembly.platform.capture_after > 0)
    if (size := next((n for n in sizes if n >= own), None)) is None:
        return None
    return Step(step.phase, size * groups, size * groups, step.context)


def _seconds(costs: Costs, call: PricedCall, found: Predicted, dtype: str) -> float:
    work = call.work(call.rows)
    name = _measured(costs, call)
    if name is None:
        found.unmeasured.add(call.said)
        return costs.unmeasured(work, arithmetic(call.kernel, dtype))
    cost, seconds = costs.kernels[name], costs.seconds(name, call.rows, work)
    if costs.is_far(name, call.rows, work):
        found.far.add(call.said)
    if found.step.phase == "decode" or not costs.multiplies(work, cost.arithmetic, seconds):
        return seconds
    if cost.lasting is None:
        found.unlasting.add(call.said)
    return seconds * (cost.lasting or 1.0)


def _measured(costs: Costs, call: PricedCall) -> str | None:
    """The name under which it was measured; codes count as plain rows where they were not."""
    names = (call.name, call.name.replace(":apply_quantized", ":apply"))
    return next((name for name in names if name in costs.kernels), None)


def _queue(costs: Costs, call: PricedCall, found: Predicted) -> float:
    """Seconds in which the host queues the call; those of the smallest op where none says."""
    name = _measured(costs, call)
    seconds = None if name is None else costs.kernels[name].queue
    if seconds is None:
        found.unqueued.add(call.said)
    return costs.launch if seconds is None else seconds


def said(assembly: Assembly, costs: Costs, context: int) -> list[str]:
    """Lines on what steps will take, for people."""
    steps = list(predictions(assembly, costs, context))
    torch = costs.versions.get("torch", "an unknown version")
    lines = [
        f"predicted from ops alone, measured on {costs.device}, {costs.date[:10]}, torch {torch}"
    ]
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
    return lines + notes(assembly, costs, steps)


def notes(assembly: Assembly, costs: Costs, steps: Sequence[Predicted]) -> list[str]:
    """What these predictions leave out, a sentence each."""
    lines, platform = list[str](), assembly.platform
    if assembly.config.speculative_algorithm is not None:
        lines.append(
            f"drafts ({assembly.config.speculative_algorithm}) are left out: these are steps of "
            "one token a request, and how many drafts are right is not known beforehand"
        )
    if assembly.mesh.ep > 1:
        lines.append(
            "steps wait for the rank whose experts have the most to do, every expert being as "
            "likely as another: trained ones may be less even, and steps longer"
        )
    measured = {ranks for curves in costs.collectives.values() for ranks in curves}
    if assembly.mesh.size > 1 and measured and assembly.mesh.tp not in measured:
        ranks = ", ".join(map(str, sorted(measured)))
        lines.append(
            f"collectives were measured with {ranks} ranks; their times with more follow from the "
            "bytes that each rank receives"
        )
    if assembly.mesh.size > 1 and not platform.own_memory:
        lines.append("ranks share this host's cores and memory: real steps take longer than these")
    if assembly.plan.sum_sizes and not any(kind in costs.collectives for kind in FAST):
        lines.append("one-shot and two-shot sums were not measured, counted as the library's")
    if assembly.mesh.hosts > 1:
        lines.append("collectives were measured on one machine: links to others take longer")
    if not costs.host:
        lines.append(
            "the engine's work on the host was not measured: steps of many requests may take "
            "longer; run ds-runtime tune host"
        )
    if platform.asynchronous and (unqueued := _names(one.unqueued for one in steps)):
        every = all(cost.queue is None for cost in costs.kernels.values())
        lines.append(
            "how long the host queues a call was not measured, counted as the smallest op's: "
            f"{'all kernels' if every else unqueued}"
        )
    if platform.asynchronous and (short := _names(one.unlasting for one in steps)):
        lines.append(f"prompts: not measured under lasting load, which may take longer: {short}")
    if far := _names(one.far for one in steps):
        lines.append(f"a guess, as they were measured for far fewer rows alone: {far}")
    missing = set[str]().union(*(one.unmeasured for one in steps))
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


def _names(found: Iterable[set[str]]) -> str:
    return ", ".join(sorted(set[str]().union(*found)))


def as_json(assembly: Assembly, costs: Costs, context: int) -> dict[str, Any]:
    """The same as values with their units: `plan --json` has them under "predicted"."""
    steps = list(predictions(assembly, costs, context))
    return {
        "costs": {"device": costs.device, "date": costs.date, "versions": dict(costs.versions)},
        "steps": [_as_json(one) for one in steps],
        "notes": notes(assembly, costs, steps),
    }


def _as_json(one: Predicted) -> dict[str, Any]:
    step, decodes = one.step, one.step.phase == "decode"
    return {
        "phase": step.phase,
        "requests": step.rows if decodes else step.sequences,
        "tokens": step.rows,
        "cached_tokens_each": step.context,
        "seconds": one.seconds,
        "tokens_per_second": step.rows / one.seconds,
        "parts_seconds": dict(one.by),
        "received_bytes": one.nbytes,
        "not_measured": sorted(one.unmeasured),
    }


def predictions(assembly: Assembly, costs: Costs, context: int) -> Iterator[Predicted]:
    """Of decode steps of `BATCHES`, as many as run at once, and of a whole step of prompts. Where
    rows of long prompts choose what they attend, one such prompt as well."""
    most = assembly.config.max_running_requests
    if (fits := room.cached_tokens(assembly)) is not None:
        most = min(most, fits // context)
    sizes = [n for n in BATCHES if n <= most] or [n for n in (most,) if n]
    for requests in sizes:
        yield predict(assembly, costs, decode(requests, context))
    tokens = min(assembly.config.max_step_tokens, assembly.config.chunked_prefill_size)
    yield predict(assembly, costs, prefill(tokens, min(PROMPT, tokens)))
    indexing = assembly.model.indexing
    if indexing is not None and tokens > max(PROMPT, indexing.top_k):
        yield predict(assembly, costs, prefill(tokens, tokens))


def _parts(one: Predicted) -> str:
    """The longest parts, in milliseconds."""
    parts = sorted(one.by.items(), key=lambda item: -item[1])[:5]
    return ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts)
