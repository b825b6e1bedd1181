"""Every kernel of a model's ops, one by one: time, rates, and how close to the device's limits.

Sites with the same op, local shape and weight format count once. Weights, and the caches of decode
attention, are kept out of the last-level cache by taking turns over copies, where the model as a
whole would not fit into it. Activations are not, as they stay in caches between ops. Torch-free
until something is timed, so that a platform's environment is set before torch is loaded.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import needed_bytes
from ds_runtime.assembly.result import Assembly
from ds_runtime.config import EngineConfig, with_changes
from ds_runtime.description.tree import padded
from ds_runtime.engine.process.entry import enter, set_environment
from ds_runtime.errors import ConfigError
from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.binding.by_rows import Shares
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import Facts, Kernel, Site
from ds_runtime.ops.contracts.caches import KV
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.declare import Cost, OpWork
from ds_runtime.ops.table import OPS
from ds_runtime.platform.contract import Ceilings
from ds_runtime.predict.calls import as_read
from ds_runtime.predict.places import arithmetic
from ds_runtime_bench.record import Neighbours
from ds_runtime_bench.shapes import config_of

if TYPE_CHECKING:
    from ds_runtime.ops.reference.inputs import TrueInputs
    from ds_runtime_bench.ops.subjects import Memory, Subject, Timed

_UNKNOWN_CACHE = 64 << 20  # bytes to keep clear of where nobody knows the cache's size
_PASSES = 3  # over all calls at least, within reason


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that look the same to a kernel, and the kernel that was bound at them."""

    sites: tuple[Site, ...]
    facts: Facts
    bound: Kernel
    width: int
    inner: str = ""  # of an op whose sites have no shape and no width

    @property
    def op(self) -> str:
        return self.sites[0].op

    @property
    def what(self) -> str:
        """`6144×2048 fp8_block`, the row width of a small op, or heads and their widths."""
        shape = self.sites[0].shape or ((self.width,) if self.width else ())
        said = "×".join(map(str, shape)) or self.inner
        return " ".join(filter(None, (said, self.sites[0].weight_format)))


@dataclass(frozen=True, slots=True)
class Figure:
    """One kernel at one number of tokens. us: median microseconds of a call; the rest follows.

    of_bandwidth and of_compute: shares of the ceilings, None where none was measured. cold: the
    weights did not stay in the last-level cache. error: the kernel raised this instead.
    """

    op: str
    method: str
    what: str
    sites: int
    tokens: int
    kernel: str
    bound: bool
    us: float = 0.0
    gb_per_s: float = 0.0
    gflop_per_s: float = 0.0
    of_bandwidth: float | None = None
    of_compute: float | None = None
    copies: int = 1
    cold: bool = True
    note: str = ""
    error: str = ""


def assembled(
    config: EngineConfig, explicit: Iterable[str], shape: str | None, weights: str | None
) -> Assembly:
    """The assembly of `config`, or of a named shape, for which no checkpoint is needed, with
    weights as they would be stored (None: in bfloat16)."""
    if shape is None:
        if weights:
            raise ConfigError(
                f"--weights {weights}: is for a --shape; a checkpoint's weights are as stored, and "
                "--quantize rounds them"
            )
        return assemble(config, explicit)
    if "model" in explicit:
        raise ConfigError(f"--shape {shape}: --model is given, too; give one of both")
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / shape
        named.mkdir()
        (named / "config.json").write_text(json.dumps(config_of(shape, weights or "bfloat16")))
        return assemble(with_changes(config, {"model": str(named)}), explicit)


def check_names(only: Sequence[str]) -> None:
    """Raises ConfigError for a name that no op has."""
    for name in only:
        if name not in OPS:
            raise ConfigError(f"--op {name!r}: known are {', '.join(OPS)}")


def groups(assembly: Assembly, only: Sequence[str] = ()) -> list[Group]:
    """The distinct things to measure, in the order of the table; `only` these ops."""
    check_names(only)
    found: dict[tuple[Any, ...], list[tuple[Site, Kernel, int]]] = {}
    choices = [(site, kernel) for site, kernel in assembly.binding.choices if kernel is not None]
    widths = _widths(assembly)
    vocab = padded(assembly.model.vocab_size, assembly.config.tp)
    sizes = Sizes(facts=assembly.binding.base, vocab=vocab, routing=assembly.model.routing)
    for site, kernel in choices:
        if only and site.op not in only:
            continue
        width = widths(site)
        key = (site.op, site.shape, site.weight_format, site.phase, width, kernel.name)
        found.setdefault(key, []).append((site, kernel, width))
    order = {name: i for i, name in enumerate(OPS)}
    made = [
        Group(
            tuple(site for site, _, _ in same),
            site_facts(assembly.binding.base, same[0][0], assembly.binding.entries),
            same[0][1],
            same[0][2],
            _cost(same[0][0].op).size(sizes),
        )
        for same in found.values()
    ]
    return sorted(made, key=lambda g: order[g.op])


def _cost(op: str) -> Cost:
    found = OPS[op].cost
    assert found is not None, op
    return found


def _widths(assembly: Assembly) -> Callable[[Site], int]:
    """Row widths of norms and activations, which their sites do not say."""
    config = assembly.model
    downs = {
        (site.layer, site.module.removesuffix(".down_proj")): site.shape[1]
        for site, _ in assembly.binding.choices
        if site.module.endswith(".down_proj")
    }

    def width(site: Site) -> int:
        if not _cost(site.op).by_width:
            return 0
        inner = config.q_lora or config.kv_lora if site.module == "self_attn" else config.hidden
        return downs.get((site.layer, site.module), inner)

    return width


def kernels_at(assembly: Assembly, group: Group, wanted: Sequence[str]) -> list[Kernel]:
    """The bound kernel, followed by others that accept the site: "all", or those of these names."""
    tag = assembly.binding.tag(group.op)
    others = [
        k
        for k in assembly.offers.kernels
        if k.op.name == group.op
        and k.name != group.bound.name
        and ("all" in wanted or k.name in wanted)
        and refusal(k, group.facts, tag) is None
    ]
    return [group.bound, *sorted(others, key=lambda k: (-k.rank, k.name))]


def refused_at(
    assembly: Assembly, group: Group, wanted: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """(name, why) of the kernels in `wanted` that are offered for the op and refuse the site."""
    tag = assembly.binding.tag(group.op)
    named = [k for k in assembly.offers.kernels if k.op.name == group.op and k.name in wanted]
    for kernel in named:
        said = refusal(kernel, group.facts, tag)
        if said is not None and kernel.name != group.bound.name:
            yield kernel.name, said


def check_kernels(assembly: Assembly, only: Sequence[str], wanted: Sequence[str]) -> None:
    """ConfigError for an op that the model has no site for, or a kernel of one that is not
    measured."""
    measured = {group.op for group in groups(assembly, only)}
    for name in only:
        if name not in measured:
            raise ConfigError(
                f"--op {name}: {assembly.plan.model} has no kernel of it here; leave it out, or "
                f"name one of {', '.join(_places(assembly))}"
            )
    for name in wanted:
        ops = dict.fromkeys(k.op.name for k in assembly.offers.kernels if k.name == name)
        if ops and not measured.intersection(ops):
            raise ConfigError(
                f"--kernels {name}: is for {' and '.join(ops)}, which is not measured: name it by "
                "--op, if the model has a site for it"
            )


def _places(assembly: Assembly) -> list[str]:
    """Ops that have a kernel."""
    return list(dict.fromkeys(group.op for group in groups(assembly)))


def _failure(e: Exception) -> str:
    """What a kernel raised, or that memory did not suffice: each allocator says that otherwise."""
    import torch

    if isinstance(e, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(e):
        return "more memory than there is: take fewer --tokens or a smaller --context"
    return f"{type(e).__name__}: {e}"


class Measurement:
    """Ceilings, and then figures, on one device."""

    def __init__(
        self,
        assembly: Assembly,
        context: int,
        most: int | None,
        seconds: float,
        beside: Measurement | None = None,
        prompt: bool = False,
    ) -> None:
        """beside: another on the same device, whose ceilings these are. prompt: as in `Sizes`."""
        self.assembly = assembly
        self.context, self.prompt = context, prompt
        self.seconds = seconds
        self.platform = assembly.platform
        set_environment(self.platform.process_env())
        enter(self.platform, threads=assembly.config.threads)
        self.device = self.platform.device(0)
        self.neighbours = Neighbours()
        self.ceilings: Ceilings = self.platform.ceilings(0) if beside is None else beside.ceilings
        self._most = most

    @property
    def stays_in_cache(self) -> bool:
        """Whether the last-level cache holds the whole model: then ops read it from there."""
        return needed_bytes(self.assembly) <= self.ceilings.cache

    def figures(
        self, only: Sequence[str], tokens: Sequence[int], kernels: Sequence[str]
    ) -> Iterator[Figure]:
        """One figure after the other; a kernel that raises gives one with its error, and one that
        was named and refuses the site one with its reason."""
        sizes = tuple(dict.fromkeys(tokens))
        for group in groups(self.assembly, only):
            for kernel in kernels_at(self.assembly, group, kernels):
                yield from self._kernel(group, kernel, sizes)
            for name, said in refused_at(self.assembly, group, kernels):
                about = (group.op, "", group.what, len(group.sites))
                yield Figure(*about, sizes[0], name, False, error=f"refused: {said}")

    def _kernel(self, group: Group, kernel: Kernel, tokens: Sequence[int]) -> Iterator[Figure]:
        bound = kernel.name == group.bound.name
        about = (group.op, "", group.what, len(group.sites))
        n = tokens[0]
        try:
            timed = self.timed(group, kernel)
            for n in tokens:
                for subject in timed.at(n):
                    yield self._figure(group, kernel, n, subject)
        except Exception as e:  # one kernel's failure is its own figure
            yield Figure(*about, n, kernel.name, bound, error=_failure(e))

    def timed(self, group: Group, kernel: Kernel, shares: Shares | None = None) -> Timed:
        """The kernel there, packed; or those that share its calls, as a model holds them."""
        from ds_runtime_bench.ops.subjects import Timed

        return Timed(kernel, self.place(group, kernel), self._memory(), shares)

    def work(self, subject: Subject, kernel: Kernel, group: Group) -> OpWork:
        """What a call of it moves and computes, weights as `kernel` reads them."""
        return as_read(subject.work, kernel, group.facts)

    def place(self, group: Group, kernel: Kernel) -> TrueInputs:
        """Where a kernel of the group is timed."""
        from ds_runtime.ops.reference.inputs import TrueInputs

        model, config = self.assembly.model, self.assembly.config
        layouts = self.assembly.binding.layouts
        fmt = group.facts.weight_format
        return TrueInputs(
            facts=group.facts,
            held=fmt if fmt in kernel.keeps else "dense",
            width=group.width,
            routing=model.routing,
            layout=layouts[OPS[group.op].layout or KV],
            context=self.context,
            prompt=self.prompt,
            vocab=padded(model.vocab_size, config.tp),
            device=self.device,
            copies=self._memory().copies,
        )

    def _memory(self) -> Memory:
        from ds_runtime_bench.ops.subjects import Memory

        most = self._most or self.platform.memory(0).free // 4
        return Memory(self.ceilings.cache or _UNKNOWN_CACHE, needed_bytes(self.assembly), most)

    def _figure(self, group: Group, kernel: Kernel, tokens: int, subject: Subject) -> Figure:
        spent = self.time(subject.calls)
        work = self.work(subject, kernel, group)
        rate, flops = work.nbytes / spent, work.flops / spent
        limit = self.ceilings.compute.get(arithmetic(kernel, group.facts.dtype))
        return Figure(
            group.op,
            subject.method,
            group.what,
            len(group.sites),
            tokens,
            kernel.name,
            kernel.name == group.bound.name,
            spent * 1e6,
            rate / 1e9,
            flops / 1e9,
            rate / self.ceilings.bandwidth if self.ceilings.bandwidth else None,
            flops / limit if limit else None,
            subject.copies,
            subject.cold,
            subject.note,
        )

    def time(self, calls: Sequence[Callable[[], Any]], after: float = 0.0) -> float:
        """Median seconds of a call: one by one, or by whole rounds where work is queued, then
        after `after` seconds of such rounds."""
        for call in calls[:2]:
            call()
        self.platform.synchronize()
        if self.platform.asynchronous:
            return self._rounds(calls, after)
        times: list[float] = []
        begin = now = time.perf_counter()
        limit = begin + self.seconds
        while now < limit or (len(times) < _PASSES * len(calls) and now < begin + 4 * self.seconds):
            for call in calls:
                call()
                last, now = now, time.perf_counter()
                times.append(now - last)
                if now >= limit and len(times) >= _PASSES:
                    break
        return statistics.median(times)

    def _rounds(self, calls: Sequence[Callable[[], Any]], after: float) -> float:
        """Rounds over all calls, replayed from a recording where the device can: no host time."""
        many = list(calls) * -(-16 // len(calls))

        def run() -> None:
            for call in many:
                call()

        run()
        self.platform.synchronize()
        if self.platform.captures:
            try:
                run = self.platform.graph_backend(0).capture(run)
            except Exception:  # not every kernel can be recorded: then host time counts
                self.platform.synchronize()
        limit = time.perf_counter() + after
        while time.perf_counter() < limit:
            run()
            self.platform.synchronize()
        times: list[float] = []
        limit = time.perf_counter() + self.seconds
        while time.perf_counter() < limit or len(times) < _PASSES:
            start = time.perf_counter()
            run()
            self.platform.synchronize()
            times.append((time.perf_counter() - start) / len(many))
        return statistics.median(times)
