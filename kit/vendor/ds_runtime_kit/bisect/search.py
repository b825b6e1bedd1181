"""`ds-runtime bisect`: a prompt op by op, each call held against the reference on its own inputs.

As every op is judged on what it was given, errors do not add up: the first kernel that departs
by more than its tolerance is the one at fault. Before, a third party's loader is asked about its
samples: what it reads wrongly is wrong for every kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.engine.device.runner import Runner
from ds_runtime.engine.process.entry import enter
from ds_runtime.engine.step.plan import RowInit, StepPlan, Work
from ds_runtime.errors import ConfigError
from ds_runtime.offline.prompts import JobMaker
from ds_runtime.parallel.world import World
from ds_runtime.sampling_params import SamplingParams
from ds_runtime_kit.bisect import repro_case
from ds_runtime_kit.bisect.op_recorder import Seen, WatchedOps
from ds_runtime_kit.checks.conformance import CaseResult, check_case, judge_last
from ds_runtime_kit.conform import versions
from ds_runtime_kit.loaders.checks import check_loader

PROMPTS = (
    "12+30=",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "a",
)


@dataclass
class Finding:
    """What came of it. shares: (layer, op, kernel) → the largest share of the tolerance used."""

    calls: int = 0
    shares: dict[tuple[int, str, str], float] = field(default_factory=dict)
    culprit: CaseResult | None = None
    where: str = ""
    step: int = 0
    alone: bool = True  # whether the culprit also departs when its case is run by itself
    loader: CaseResult | None = None  # what the loader of the checkpoint reads wrongly
    plugin: str = ""  # of that loader

    @property
    def found(self) -> bool:
        """Whether anything is at fault."""
        return self.culprit is not None or self.loader is not None


class _Departed(Exception):
    """A kernel departs: what was seen, and the verdict."""

    def __init__(self, seen: Seen, result: CaseResult) -> None:
        super().__init__(result.failure)
        self.seen = seen
        self.result = result


def bisect(
    config: EngineConfig,
    explicit: Iterable[str],
    prompts: Sequence[str],
    steps: int,
    out: Path,
    extra_plugins: Sequence[ModuleType] = (),
) -> Finding:
    """Run the prompts together, then `steps` decode steps; a departing call is written to `out`."""
    if config.tp > 1:
        raise ConfigError(f"bisect --tp {config.tp}: one rank is watched; use --tp 1")
    config = with_changes(config, {"disable_graph": True, "max_running_requests": len(prompts)})
    assembly = assemble(config, {*explicit, "disable_graph", "max_running_requests"}, extra_plugins)
    finding = Finding()
    if assembly.loader.provider in assembly.offers.third_party:
        finding.plugin = assembly.plugins.owners[assembly.loader.provider]
        finding.loader = next((r for r in check_loader(assembly.loader) if not r.ok), None)
        if finding.loader is not None:
            return finding

    def judge(seen: Seen) -> None:
        result = judge_last(seen.kernel, seen.case, seen.ran, assembly.offers)
        finding.calls += 1
        key = (seen.case.facts.layer, seen.kernel.op.name, seen.kernel.name)
        share = result.error / result.tolerance if result.tolerance else 0.0
        finding.shares[key] = max(share, finding.shares.get(key, 0.0))
        if not result.ok:
            raise _Departed(seen, result)

    enter(assembly.platform, threads=config.threads)
    ops = WatchedOps(assembly.binding, assembly.offers, judge)
    runner = Runner(assembly, World.alone(), bound=ops)
    try:
        ops.quiet = False
        for plan in _plans(assembly, prompts, steps):
            finding.step = plan.step
            runner.collect(runner.launch(plan))
    except _Departed as e:
        _tell(finding, e, assembly, out)
    finally:
        runner.close()
    return finding


def _tell(finding: Finding, e: _Departed, assembly: Assembly, out: Path) -> None:
    seen = e.seen
    finding.culprit, finding.where = e.result, seen.path
    finding.alone = not check_case(seen.kernel, seen.case, assembly.offers).ok
    report = assembly.plugins.reports.get(assembly.plugins.owners[seen.kernel.provider])
    held = repro_case.Capsule(
        op=seen.kernel.op.name,
        kernel=seen.kernel.name,
        case=seen.case,
        said=e.result.failure,
        where=f"{seen.path}, step {finding.step}",
        versions=versions(report),
    )
    repro_case.save(held, out)


def _plans(assembly: Assembly, prompts: Sequence[str], steps: int) -> list[StepPlan]:
    """Prompts in two pieces, so that the second reads the first from the cache; then decoding."""
    maker = JobMaker(assembly)
    tokens = [maker.tokenizer.encode(p) for p in prompts]
    page = assembly.config.page_size
    pages, first = [], 0
    for ids in tokens:
        count = -(-(len(ids) + steps) // page)
        pages.append(list(range(first, first + count)))
        first += count
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1)
    inits = [
        RowInit(row=i, params=params, seed=i, choice=0, prompt=ids) for i, ids in enumerate(tokens)
    ]
    whole = assembly.config.max_step_tokens // len(prompts)
    pieces: list[list[Work]] = []
    for i, ids in enumerate(tokens):
        cut = min(whole, max(1, -(-len(ids) // 2)))
        for n, start in enumerate(range(0, len(ids), cut)):
            length = min(cut, len(ids) - start)
            work = Work(
                rid=str(i),
                row=i,
                start=start,
                length=length,
                pages=pages[i],
                tokens=ids[start : start + length],
                sample=start + length == len(ids),
            )
            while len(pieces) <= n:
                pieces.append([])
            pieces[n].append(work)
    plans = [StepPlan(step=n, works=works) for n, works in enumerate(pieces)]
    plans[0].init = inits
    for k in range(steps):
        works = [
            Work(rid=str(i), row=i, start=len(ids) + k, length=1, pages=pages[i])
            for i, ids in enumerate(tokens)
        ]
        plans.append(StepPlan(step=len(plans), works=works))
    return plans


def render(finding: Finding, out: Path) -> str:
    """The verdict, and how close each layer came to its bounds."""
    if (wrong := finding.loader) is not None:
        return (
            f"loader {wrong.kernel} of plugin {finding.plugin} does not conform, so no kernel was "
            f"watched: {wrong.check}, case {wrong.case!r}: {wrong.failure.rstrip()}\n"
            f"all that is wrong with it: ds-runtime conform {finding.plugin} --op loader"
        )
    lines = []
    layers: dict[int, tuple[float, str]] = {}
    for (layer, op, kernel), share in finding.shares.items():
        if share >= layers.get(layer, (-1.0, ""))[0]:
            layers[layer] = (share, f"{op} ({kernel})")
    for layer, (share, who) in sorted(layers.items()):
        place = f"layer {layer}" if layer >= 0 else "outside"
        lines.append(f"{place:<9} {share:>8.1%} of the tolerance at most: {who}")
    culprit = finding.culprit
    if culprit is None:
        lines.append(f"no kernel departs from the reference in {finding.calls} calls")
        return "\n".join(lines)
    lines.append(
        f"{culprit.kernel} departs first: {culprit.op} at {finding.where}, step {finding.step}, "
        f"call {finding.calls}: {culprit.failure}"
    )
    if not finding.alone:
        lines.append("run by itself on the same inputs it does not: look at what it keeps of calls")
    lines.append(f"written to {out}; replay it with ds-runtime conform --case {out}")
    lines.append(f"until it is mended: --pin {culprit.op}=KERNEL")
    return "\n".join(lines)
