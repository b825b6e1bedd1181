"""The calls of ops and the collectives of a step, from what was decided. Torch-free.

A binding has a place for every op that a model may call. Which of them a step calls follows from
the others: a fused op is called in place of those that it uses, where rows may go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.result import Assembly
from ds_runtime.description.sites import INDEXER_TREE
from ds_runtime.description.tree import (
    ATTENTION,
    DOWN,
    EMBEDDING,
    HEAD,
    INDEXER,
    MLP,
    Q_B,
    QKV_A,
    SHARED,
    padded,
)
from ds_runtime.ops.binding.facts import site_facts
from ds_runtime.ops.contract import DRAFT, Facts, Kernel, Site
from ds_runtime.ops.contracts.attention.index import scored_rows
from ds_runtime.ops.contracts.work import Sizes
from ds_runtime.ops.declare import OpWork
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.sums.kinds import GATHER_LOGITS, GATHERED, LIBRARY
from ds_runtime.predict.busiest import of_the_busiest
from ds_runtime.predict.places import CODING, Places, serving

Phase = Literal["decode", "prefill"]
Branch = Literal["", "shared", "choice"]  # shared experts, beside the choice of routed ones
APART = {"logprobs", "mask_logits"}  # that a request asks for
PROMPTS = "prompts"  # in place of the method, where rows of prompts are timed apart
SCORED = {"index_scores", "index_topk"}  # which take few rows at once of long sequences
_IN_PREFIX = {"cache_gather", "merge_state", "mha_prefill_quantize"}  # of prompts with a past
_IN_ONE = {ATTENTION, *(f"{ATTENTION}.{name}" for name in (QKV_A, Q_B))}
_CHOICE = {"router_logits", "route", "route_softplus"}
_BEHIND = {"mla_decode", "sparse_decode"}  # what attends
_FED = {  # the end of a module → where the op in front of it is, and which: it may bring codes
    QKV_A: ("block", "add_rms_norm_quantize"),
    Q_B: (ATTENTION, "rms_norm_quantize"),
    DOWN: ("", "silu_mul_quantize"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """rows: of all sequences, tokens that go through the layers; wanted: rows that go through the
    head; context: cached tokens of each sequence, in front of a prompt those of its beginning;
    sequences: in a prefill, prompts of rows / sequences tokens each."""

    phase: Phase
    rows: int
    wanted: int
    context: int = 0
    sequences: int = 1

    @property
    def each(self) -> int:
        """Tokens of a prompt that are new."""
        return max(1, self.rows // self.sequences)

    def most(self, groups: int) -> int:
        """Rows of the group that has the most: whole prompts, where sequences are divided."""
        if self.phase == "decode":
            return -(-self.rows // groups)
        longest = -(-self.rows // self.sequences)
        return min(self.rows, -(-self.sequences // groups) * longest)


@dataclass(frozen=True, slots=True)
class PricedCall:
    """One method of a kernel at a place. rows: of the call; work: by rows; captured: in the
    part of a step that is captured; count: how often it is made; branch: of which of two sides, if
    a capture may hold it in parallel with the other; prompts: its rows choose what they see of a
    prompt."""

    op: str
    kernel: Kernel
    method: str
    rows: int
    work: Callable[[int], OpWork]
    captured: bool
    count: int = 1
    branch: Branch = ""
    prompts: bool = False

    @property
    def name(self) -> str:
        """As in `Costs.kernels`."""
        return key(self.kernel, PROMPTS if self.prompts else self.method)

    @property
    def said(self) -> str:
        """For people."""
        return f"{self.kernel.name} (prompts)" if self.prompts else self.kernel.name


@dataclass(frozen=True, slots=True)
class Crossed:
    """A collective: what `Costs.collective` takes, and how often."""

    kind: str
    ranks: int
    nbytes: float
    count: int


def key(kernel: Kernel, method: str) -> str:
    """The name of one method of a kernel."""
    return f"{kernel.name}:{method}"


def as_read(work: OpWork, kernel: Kernel, facts: Facts) -> OpWork:
    """The work with the weights' bytes as `kernel` reads them, where it packs them tighter."""
    reads = kernel.footprint.reads
    share = 1.0 if reads is None else reads(facts)
    return replace(work, weights=share * work.weights)


def calls(assembly: Assembly, step: Step) -> Iterator[PricedCall]:
    """The calls of a step, those of drafts left out."""
    binding, mesh = assembly.binding, assembly.mesh
    bound = Places(binding.choices, binding.shares)
    own, scored = step.most(mesh.attn_dp), _scored(assembly, step)
    for site, kernel in binding.choices:
        if kernel is None or site.role == DRAFT:
            continue
        if not (rows := _rows(assembly, site, step, own)):
            continue
        if not (count := _count(site, step, bound, scored, rows)):
            continue
        if site.op in SCORED:
            count *= (parts := -(-rows // scored_rows(_width(assembly, step))))
            rows = -(-rows // parts)
        shares = binding.shares.get((site.op, site.layer, site.module))
        sizes = _sizes(assembly, site, step, bound)
        for method in _methods(site, step, bound, scored, rows):
            serves = serving(shares, kernel, method, rows)
            held = "dense"
            if site.weight_format in serves.keeps:
                held = site.weight_format
            yield PricedCall(
                site.op,
                serves,
                method,
                rows,
                _work(serves, method, replace(sizes, held=held), step),
                site.captured and step.phase == "decode",
                count,
                _branch(site),
                sizes.prompt,
            )


def _scored(assembly: Assembly, step: Step) -> bool | None:
    """Whether an indexer chooses what rows attend, as `model.indexer.Selection` says; None: there
    is none, or it always does."""
    model, base = assembly.model, assembly.binding.base
    if model.indexing is None or model.hybrid is not None:
        return None
    if step.phase == "decode":
        always = base.graph_capture or base.batch_invariant
        return always or step.context + 1 > model.indexing.top_k
    return step.context + step.each > model.indexing.top_k


def _width(assembly: Assembly, step: Step) -> int:
    """Columns of the scores of a row: whole pages."""
    page, new = assembly.config.page_size, step.each if step.phase == "prefill" else 1
    return -(-(step.context + new) // page) * page


def _branch(site: Site) -> Branch:
    if site.module.startswith(SHARED):
        return "shared"
    return "choice" if site.module == MLP and site.op in _CHOICE else ""


def _count(site: Site, step: Step, bound: Places, scored: bool | None, rows: int) -> int:
    """How often a step calls the op of a place; 0 where others do its work."""
    if site.phase not in ("any", step.phase) or site.op in APART | _IN_PREFIX:
        return 0
    if site.module == INDEXER_TREE:  # of drafts
        return 0
    if scored is not None and (only := _where(site)) is not None and scored != only:
        return 0
    if _in_one(site.layer, step, bound) and site.module in _IN_ONE and site.op not in _BEHIND:
        return 0
    here = bound.called(site.layer, site.module, rows)
    if site.op in CODING - here:
        return 0
    if site.module == "block":
        return _norms(here, site.layer).count(site.op)
    if (site.module, site.op) == (ATTENTION, "rms_norm"):  # of queries; that of latents is fused
        up = bound.at(site.layer, f"{ATTENTION}.{Q_B}")
        return int("linear" in up and "rms_norm_quantize" not in here)
    return int(not any(site.op in OPS[other].uses for other in here - _IN_PREFIX))


def _where(site: Site) -> bool | None:
    """Whether a place is for rows that an indexer chooses for, or for others; None: for all."""
    if site.op == "sparse_prefill":
        return True
    if site.op == "mha_prefill":
        return False
    chooses = site.module.startswith(INDEXER) and site.op != "index_prologue"  # keys are kept
    return True if chooses else None


def _in_one(layer: int, step: Step, bound: Places) -> bool:
    """Whether a fused kernel makes all inputs of a layer's attention."""
    return step.phase == "decode" and "mla_inputs" in bound.at(layer, f"{ATTENTION}.inputs")


def _norms(here: set[str], layer: int) -> tuple[str, str]:
    """Of a block's norms, those that are called: one in front of attention, which may quantise, and
    one behind it."""
    first = "rms_norm" if layer == 0 else "add_rms_norm"
    quantises = f"{first}_quantize"
    return (quantises if quantises in here else first), "add_rms_norm"


def _methods(
    site: Site, step: Step, bound: Places, scored: bool | None, rows: int
) -> tuple[str, ...]:
    cost = OPS[site.op].cost
    assert cost is not None, site.op
    if site.op == "mla_absorb":
        if _in_one(site.layer, step, bound):
            return ("apply_v",)
        return cost.step if step.phase == "decode" or scored else ("expand",)
    if site.op == "linear" and _fed(site, bound, rows):
        return ("apply_quantized",)
    return tuple(cost.calls)


def _fed(site: Site, bound: Places, rows: int) -> bool:
    """Whether what is in front of this weight may bring codes."""
    module, _, last = site.module.rpartition(".")
    if last not in _FED:
        return False
    where, op = _FED[last]
    return op in bound.called(site.layer, where or module, rows)


def _rows(assembly: Assembly, site: Site, step: Step, own: int) -> int:
    """Of a call: of this rank's own sequences, or of those of all groups. Behind the attention of
    the last layer those alone whose logits are wanted, where they are few."""
    model = assembly.model
    if site.module.startswith(MLP) and site.layer == model.layers - 1 and model.hybrid is None:
        wanted = -(-step.wanted // assembly.mesh.attn_dp)
        own = wanted if wanted <= own // 2 else own
    every = own * assembly.mesh.attn_dp
    if site.module in (HEAD, "sampler", "norm"):
        return step.wanted
    if site.module.startswith("mlp") and assembly.mesh.attn_dp > 1:
        by_number = assembly.mesh.ep > 1 and not site.op.startswith("experts")
        routed = site.module == "mlp" or "shared" in site.module
        moe = assembly.model.is_moe(site.layer)
        return own if by_number and routed and moe else every
    return every if site.module == EMBEDDING else own


def _sizes(assembly: Assembly, site: Site, step: Step, bound: Places) -> Sizes:
    model, base = assembly.model, assembly.binding.base
    cost = OPS[site.op].cost
    width = 0
    if cost is not None and cost.by_width:
        width = model.q_lora or model.kv_lora if site.module == ATTENTION else model.hidden
        width = bound.width.get((site.layer, f"{site.module}.{DOWN}"), width)
    return Sizes(
        facts=site_facts(base, site, assembly.binding.entries),
        width=width,
        context=step.context,
        vocab=padded(model.vocab_size, assembly.config.tp),
        routing=model.routing,
        prompt=step.phase == "prefill" and cost is not None and cost.chooses,
    )


def _work(kernel: Kernel, method: str, sizes: Sizes, step: Step) -> Callable[[int], OpWork]:
    cost = kernel.op.cost
    assert cost is not None
    of = cost.calls["apply" if method == "apply_quantized" else method][1]
    each = step.each
    if sizes.prompt:
        return lambda rows: _times(of(sizes, each), rows / each)
    if step.phase == "prefill" and kernel.op.by_sequence:
        return lambda rows: _times(of(sizes, min(each, rows)), max(1.0, rows / each))
    if kernel.op.absent:
        return lambda rows: of_the_busiest(
            as_read(of(sizes, rows), kernel, sizes.facts), sizes, rows
        )
    return lambda rows: as_read(of(sizes, rows), kernel, sizes.facts)


def _times(work: OpWork, count: float) -> OpWork:
    """Of so many sequences."""
    return OpWork(*(count * getattr(work, f.name) for f in fields(work)))


def crossed(assembly: Assembly, step: Step) -> Iterator[Crossed]:
    """The collectives of a step, as `Crossing` counts them."""
    mesh = assembly.mesh
    if mesh.size == 1:
        return
    crossing, layers = Crossing.of(assembly), assembly.model.layers
    groups, heads, own = mesh.attn_dp, mesh.attn_tp, step.most(mesh.attn_dp)
    width, every, wanted = crossing.width, own * mesh.attn_dp, step.wanted
    kind = LIBRARY if crossing.in_order else crossing.sum_kind(own)
    if heads > 1:  # behind attention; and behind a FFN, where there are groups
        times = layers + (layers + 1 if groups > 1 else 0)
        yield Crossed(kind, heads, own * width, times)
    if groups == 1:  # behind a FFN and the embedding
        yield Crossed(kind, mesh.tp, every * width, layers + 1)
    else:
        yield Crossed("gather_rows", groups, every * width, layers - crossing.routed)
        if crossing.routed:  # with weights and ids of chosen experts
            joined = width - crossing.coded + crossing.choices
            yield Crossed("gather_rows", groups, every * joined, crossing.routed)
        yield Crossed("gather_rows", groups, every * 8, 1)  # tokens
        yield Crossed("reduce_scatter", groups, every * width, layers + 1)
        yield Crossed("gather_rows", groups, wanted * width, 1)
    logits = wanted * crossing.logits
    kind = GATHER_LOGITS if logits <= assembly.sums.gathered else GATHERED
    yield Crossed(kind, mesh.tp, logits, 1)
