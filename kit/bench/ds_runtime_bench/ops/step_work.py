"""What a decode step must at least move and compute, site by site. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_runtime.assembly.result import Assembly
from ds_runtime.description.tree import HEAD
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import Facts, Site
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.table import OPS
from ds_runtime.predict.calls import as_read


def decode_step(
    sites: Iterable[Site], facts: Facts, tokens: int, context: int = 0
) -> dict[str, OpWork]:
    """A decode step of `tokens` sequences with `context` cached tokens each, by op."""
    found: dict[str, OpWork] = {}
    for site in sites:
        sizes = Sizes(facts=site_facts(facts, site), context=context, held=site.weight_format)
        cost = OPS[site.op].cost
        if cost is not None and (work := cost.of_step(sizes, tokens)).nbytes:
            name = HEAD if site.module == HEAD else site.op
            found[name] = found.get(name, OpWork()) + work
    return found


def step_bytes(
    assembly: Assembly, tokens: Sequence[int], context: int, only: Sequence[str] = ()
) -> dict[int, dict[str, OpWork]]:
    """What decode steps of this many sequences must read, by op; `only` these."""
    base = assembly.binding.base
    found: dict[int, dict[str, OpWork]] = {n: {} for n in tokens}
    for site, kernel in assembly.binding.choices:
        if kernel is None or (only and site.op not in only):
            continue
        for n, step in found.items():
            for name, whole in decode_step((site,), base, n, context).items():
                work = as_read(whole, kernel, site_facts(base, site))
                step[name] = step.get(name, OpWork()) + work
    return found
