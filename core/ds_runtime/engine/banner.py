"""What the operator sees at start: where it runs, what it holds, which kernel serves each op."""

from __future__ import annotations

import math

from ds_runtime.assembly.plan import PlanRow
from ds_runtime.assembly.result import Assembly
from ds_runtime.assembly.room import expanded_said
from ds_runtime.common.progress import amount
from ds_runtime.description.config import ModelConfig
from ds_runtime.description.structure import stored_modules
from ds_runtime.engine.device.runner import Runner
from ds_runtime.kv.tiers.room import HostRoom

DUMMY = "weights   DUMMY: random numbers made on the device; answers mean nothing"


def banner(assembly: Assembly, runner: Runner) -> str:
    """The start-up text of a loaded engine."""
    device, model, plan = assembly.device, assembly.model, assembly.plan
    memory = assembly.platform.memory(runner.local_rank)
    config, mesh = assembly.config, assembly.mesh
    ranks = f", {mesh.size} ranks" if mesh.size > 1 else ""
    per_rank = " per rank" if mesh.size > 1 else ""
    places = f"{runner.num_pages} pages of {plan.page_size}"
    if mesh.attn_dp > 1:
        each = "ranks" if mesh.attn_tp == 1 else f"groups of {mesh.attn_tp} ranks"
        places = f"{places} on each of {mesh.attn_dp} {each}"
    lines = [
        f"platform  {plan.platform}: {device.name} ({device.arch}, {device.cores} cores){ranks}",
        f"model     {plan.model}: {model.architecture}, {model.layers} layers, "
        f"{count(parameters(model))} parameters, {config.dtype}, "
        f"{amount(runner.model.packed_bytes)} packed{per_rank}",
        *([DUMMY] if config.load_format == "dummy" else ()),
        f"memory    {amount(memory.total)}, {amount(memory.free)} free",
        f"KV cache  {runner.kv_tokens} tokens in {places}, "
        f"{amount(runner.memory.total)}{per_rank} ({runner.memory.total / memory.total:.0%} of the "
        f"device), {plan.kv_layout}",
        f"contexts  {runner.context_length} tokens each; the KV cache holds "
        f"{runner.kv_tokens / runner.context_length:.1f} full ones; at most "
        f"{config.max_running_requests} requests run at once",
        *(f"{'cache':<10}{line}" for line in expanded_said(assembly)),
        *_tiers(runner),
        *(f"{'copies':<10}{form}" for form in assembly.forms),
        *(f"{'config':<10}{name}: {new} ({by}: {why})" for name, new, by, why in plan.changes),
        *(f"{'sums':<10}{line}" for line in assembly.sums_said()),
        *op_lines(assembly),
        *_not_captured(runner),
        *(f"{'not used':<10}{name}: {refusal}" for name, refusal in assembly.others),
    ]
    return "\n".join(lines)


def _tiers(runner: Runner) -> list[str]:
    """What lies below the device, and whether it pays."""
    if runner.below is None:
        return []
    room = HostRoom.of(runner.config, runner.memory)
    lines = [f"host memory for {room.pages} pages, {amount(runner.below.nbytes)}"]
    lines += runner.pace.said if runner.pace is not None else []
    return [f"{'tiers':<10}{line}" for line in lines]


def _not_captured(runner: Runner) -> list[str]:
    """Which steps with drafts run op by op, though steps are captured."""
    if not (sizes := runner.programs.left_out) or runner.speculation is None:
        return []
    tokens = max(runner.speculation.choices) + 1
    most = max(runner.programs.sizes, default=0)
    each = " in each group" if runner.config.attn_dp > 1 else ""
    return [
        f"{'graphs':<10}not captured: steps of more requests than {most}{each}, since {sizes[0]} "
        f"of {tokens} tokens are over --max-step-tokens {runner.config.max_step_tokens}"
    ]


def op_lines(assembly: Assembly) -> list[str]:
    """One line per op: its kernels, with the number of sites where there are several."""
    chosen: dict[str, dict[str, int]] = {}
    for decision in assembly.binding.decisions:
        kernels = chosen.setdefault(decision.op, {})
        kernels[decision.kernel] = kernels.get(decision.kernel, 0) + 1
    lines = []
    for row in assembly.plan.rows:
        kernels = chosen.pop(row.op, {})
        if not kernels:
            continue  # said with the op's first row
        said = ", ".join(f"{k} ×{n}" if len(kernels) > 1 else k for k, n in kernels.items())
        lines.append(f"{'op':<10}{row.op:<21} {said}")
    return lines


def warnings(assembly: Assembly) -> list[str]:
    """A line per broken plugin and per heavy op that no plugin serves, to be shown once."""
    return [f"warning: {said}" for said in assembly.left_out()] + [
        f"warning: {row.op} at {', '.join(row.sites)} runs on the slow reference{_why(row)}"
        for row in assembly.plan.heavy_references()
    ]


def _why(row: PlanRow) -> str:
    """What the first kernel said that would be faster; nothing where somebody wished it so."""
    faster = [r for r in row.refused if not r[0].startswith("reference.")]
    return f" ({faster[0][0]}: {faster[0][1]})" if faster else ""


def parameters(model: ModelConfig) -> int:
    """Logical parameters of the whole model, without MTP layers."""
    stored = stored_modules(model, lambda module: "").values()
    return sum(math.prod(s.shape) for s in stored)


def count(value: int) -> str:
    """`236.1 B`, `4.2 M`."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {letter}"
    return str(value)
