"""Contracts of attention over the paged cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import of_heads
from ds_runtime.ops.contracts.work import by_heads, by_latent
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.batch import Batch, Limits
    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

_TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3}
torch = later("torch")
batch = later("ds_runtime.ops.batch")
cases = later("ds_runtime.ops.reference.cases")
dense = later("ds_runtime.ops.reference.attention.dense")
layouts = later("ds_runtime.ops.reference.layouts")


class MlaDecode(Protocol):
    """Absorbed MLA over the paged latent cache: one shared K/V head of kv_lora + rope.

    * `state(limits)` allocates the persistent buffers of a step, once.
    * `prepare(state, batch)` runs on the host once per step and writes into the state. It reads
      batch.decode, which is None if the step has no such rows.
    * `run(state, q, cache, scale)` is called once per layer. q: [rows, heads, kv_lora + rope], the
      absorbed latent part, then the rotated rope part. cache: one layer in the bound KV layout.

    Returns a new [rows, heads, kv_lora] in q.dtype. Softmax in fp32 of q·k·scale. Sequence i has n
    rows: 1, or q_lens[i]. Its row j attends the first kv_lens[i] − (n − 1 − j) cached tokens (≥ 1,
    its own token included). Tokens beyond kv_lens and pages of others may hold NaN. 0 sequences and
    0 rows are legal.

    A kernel whose attribute `prepares_on_device` is true only queues work in `prepare`. A captured
    step then holds `prepare`, before `run` in the same recording. Each replay computes the queued
    work again, from tensors of batch.decode at the same addresses. Such a `prepare` may read only
    this on the host: the number of sequences, q_lens, the shapes of its tensors, and whether there
    is a tree.

    A kernel may declare the phase `tree`. batch.decode.tree may then be there, and row j attends
    the tokens that DecodePart names, always including its own. Tokens that it does not see are
    finite.

    A kernel that promises `many_rows` takes any number of rows of a sequence, whatever
    Limits.max_queries says. It reaches about the FLOPs per second of MhaPrefill. Short chunks of
    prompts after many cached tokens then attend through it.

    Version 0 had one row per sequence. Source: the DeepSeek-V2 technical report, arXiv 2405.04434,
    section 2.1.
    """

    def state(self, limits: Limits) -> Any: ...

    def prepare(self, state: Any, batch: Batch) -> None: ...

    def run(self, state: Any, q: Tensor, cache: Tensor, scale: float) -> Tensor: ...


class MhaDecode(Protocol):
    """Attention of new tokens over a paged cache of expanded keys and values, as in prefill.

    * `state` and `prepare`: as in MlaDecode.
    * `run(state, q, q_rope, cache, scale)`: q [rows, heads, nope] and q_rope [rows, heads, rope]
      are the two parts of queries. Head dims are contiguous, rows may be strided. cache: one layer
      in the bound KV layout. The entry of a token has its key [nope] and its value [v] for each
      head. After these it has the rotated key [rope] that all heads share.

    Returns a new [rows, heads, v] in q.dtype. Softmax in fp32 of (q·k + q_rope·k_rope)·scale. A row
    sees the tokens that it sees in MlaDecode. Tokens that no row sees and pages of others may hold
    NaN; tokens of trees are finite as in MlaDecode. 0 sequences is legal.
    """

    def state(self, limits: Limits) -> Any: ...

    def prepare(self, state: Any, batch: Batch) -> None: ...

    def run(self, state: Any, q: Tensor, q_rope: Tensor, cache: Tensor, scale: float) -> Tensor: ...


def mla_decode_samples(facts: Facts) -> Iterator[Case]:
    """One state over several steps: shuffled pages, NaN wherever nobody may look."""
    page, heads = facts.page_size, facts.dims["heads"]
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    steps: tuple[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]], ...] = (
        ("one token", ((1,),), ()),
        ("page edges", ((page, page + 1, 2 * page, 1), (max(1, page - 1), 3 * page + 2)), ()),
        ("many, then few, then none", (tuple(range(1, 20)), (7,), ()), ()),
        ("long", ((1000, 3),), ()),
        ("two rows each", ((2, page + 1, 70),), (2, 2, 2)),
        ("uneven rows", ((9, page, 2 * page + 1, 130),), (4, 1, 3, 5)),
    )
    for label, batches, q_lens in steps:
        make = cases.Maker(facts, label)
        pages = max(-(-n // page) for lens in batches for n in lens) + 1
        most = max(q_lens, default=1)
        limits = batch.Limits(64, 24, pages, page, heads, torch.device("cpu"), most)
        calls = [cases.Call((limits,), method="state", save="state")]
        for lens in batches:
            cache, table = make.paged(lens)
            step = dense.decode_batch(lens, table, q_lens)
            calls.append(cases.Call((cases.Saved("state"), step), "prepare", save="none"))
            q = make.normal(step.num_decode, heads, width, scale=2)
            calls.append(cases.Call((cases.Saved("state"), q, cache, width**-0.5), method="run"))
        yield cases.Case(label, facts, tuple(calls))
    for label, lens, trees in (
        ("short trees", (5, page + 3), ((0, 0, 1), (0, 1))),
        (
            "trees of several sizes",
            (70, 64, 2 * page + 9, 200),
            ((0, 0, 1, 2, 2), (), (0,), (0, 1, 2)),
        ),
        ("widest tree", (63 + 1, 63 + 90), (tuple(i // 2 for i in range(63)), (0,) * 63)),
    ):
        yield _tree_case(facts, label, lens, trees)


def _tree_case(
    facts: Facts, label: str, lens: tuple[int, ...], trees: tuple[tuple[int, ...], ...]
) -> Case:
    """trees: per sequence the parent of each node behind the root, which is node 0."""
    make, page, heads = cases.Maker(facts, label), facts.page_size, facts.dims["heads"]
    width = facts.dims["kv_lora"] + facts.dims["qk_rope"]
    q_lens = tuple(len(parents) + 1 for parents in trees)
    pages = max(-(-n // page) for n in lens) + 1
    limits = batch.Limits(256, 24, pages, page, heads, torch.device("cpu"), max(q_lens))
    cache, table = make.paged(lens)
    step = dense.decode_batch(lens, table, q_lens)
    assert step.decode is not None
    step.decode = replace(
        step.decode, tree=torch.cat([dense.tree_bits(parents) for parents in trees])
    )
    q = make.normal(step.num_decode, heads, width, scale=2)
    made: Case = cases.Case(
        label,
        replace(facts, phase="tree"),
        (
            cases.Call((limits,), method="state", save="state"),
            cases.Call((cases.Saved("state"), step), "prepare", save="none"),
            cases.Call((cases.Saved("state"), q, cache, width**-0.5), method="run"),
        ),
    )
    return made


def mha_decode_samples(facts: Facts) -> Iterator[Case]:
    """One state over several steps: shuffled pages, NaN wherever nobody may look; trees."""
    page = facts.page_size
    steps: tuple[tuple[str, tuple[tuple[int, ...], ...], tuple[int, ...]], ...] = (
        ("one token", ((1,),), ()),
        ("page edges", ((page, page + 1, 2 * page, 1), (max(1, page - 1), 3 * page + 2)), ()),
        ("many, then few, then none", (tuple(range(1, 14)), (7,), ()), ()),
        ("long", ((300, 3),), ()),
        ("uneven rows", ((9, page, 2 * page + 1, 130),), (4, 1, 3, 5)),
    )
    for label, batches, q_lens in steps:
        yield _expanded_case(facts, label, batches, q_lens)
    for label, lens, trees in (
        ("short trees", (5, page + 3), ((0, 0, 1), (0, 1))),
        ("trees of several sizes", (70, 64, 2 * page + 9), ((0, 0, 1, 2, 2), (), (0,))),
    ):
        q_lens = tuple(len(parents) + 1 for parents in trees)
        bits = torch.cat([dense.tree_bits(parents) for parents in trees])
        yield _expanded_case(replace(facts, phase="tree"), label, (lens,), q_lens, bits)


def _expanded_case(
    facts: Facts,
    label: str,
    batches: tuple[tuple[int, ...], ...],
    q_lens: tuple[int, ...],
    bits: Tensor | None = None,
) -> Case:
    """Steps for sequences of these lengths with so many rows each; bits: those of trees."""
    make, page, heads = cases.Maker(facts, label), facts.page_size, facts.dims["heads"]
    nope, rope = facts.dims["qk_nope"], facts.dims["qk_rope"]
    pages = max(-(-n // page) for lens in batches for n in lens) + 1
    limits = batch.Limits(
        64, 24, pages, page, heads, torch.device("cpu"), max_queries=max(q_lens, default=1)
    )
    calls = [cases.Call((limits,), method="state", save="state")]
    for lens in batches:
        cache, table = make.paged(lens, width=layouts.expanded_width(facts.dims))
        step = dense.decode_batch(lens, table, q_lens)
        if bits is not None and step.decode is not None:
            step.decode = replace(step.decode, tree=bits)
        calls.append(cases.Call((cases.Saved("state"), step), "prepare", save="none"))
        q = make.inside(make.normal(step.num_decode, heads, nope, scale=2), 0, rope)
        q_rope = make.inside(make.normal(step.num_decode, heads, rope, scale=2), 8, 0)
        scale = (nope + rope) ** -0.5
        calls.append(cases.Call((cases.Saved("state"), q, q_rope, cache, scale), method="run"))
    made: Case = cases.Case(label, facts, tuple(calls))
    return made


def _caches(p: TrueInputs, tokens: int) -> Any:
    return p.in_turn(lambda: p.cache(tokens * p.pages(p.context)))


def _latent_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, lora, rope = p.dims("heads", "kv_lora", "qk_rope")
    return p.normal(tokens, heads, lora + rope), _caches(p, tokens), (lora + rope) ** -0.5


def _expanded_inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    heads, nope, rope = p.dims("heads", "qk_nope", "qk_rope")
    queries = p.normal(tokens, heads, nope), p.normal(tokens, heads, rope)
    return *queries, _caches(p, tokens), (nope + rope) ** -0.5


def _mla_decode(s: Sizes, tokens: int) -> OpWork:
    """One row per sequence of `context` tokens."""
    heads, lora, rope = s.dims("heads", "kv_lora", "qk_rope")
    seen, width = tokens * s.context, lora + rope
    return OpWork(
        reads=tokens * heads * width * s.item,
        writes=tokens * heads * lora * s.item,
        flops=2.0 * seen * heads * (width + lora),
        cached=seen * width * s.kept,
    )


def _mha_decode(s: Sizes, tokens: int) -> OpWork:
    """One row per sequence of `context` tokens."""
    heads, nope, rope, v = s.dims("heads", "qk_nope", "qk_rope", "v")
    seen = tokens * s.context
    return OpWork(
        reads=tokens * heads * (nope + rope) * s.item,
        writes=tokens * heads * v * s.item,
        flops=2.0 * seen * heads * (nope + rope + v),
        cached=seen * (heads * (nope + v) + rope) * s.kept,
    )


class DecodeOps(Area):
    """Attention of new tokens over all that is cached."""

    mla_decode: MlaDecode = op(
        reference="ds_runtime.ops.reference.attention.dense:ReferenceMlaDecode",
        # Queries and probabilities in e4m3, each 2.6e-2 in the mean square, of scores that add up.
        tolerance={**_TOLERANCE, "fp8_queries": 6e-2},
        results={"run": lambda f, state, q, *_: of_heads(q, f.dims["kv_lora"])},
        by_sequence=True,
        adapter="ds_runtime.ops.binding.adapters:mla_decode",
        heavy=True,
        layout="kv",
        chooses=True,
        waits=True,
        cost=Cost({"run": (_latent_inputs, _mla_decode)}, step=("run",), size=by_latent),
        summary="absorbed attention over the paged latent cache",
    )
    mha_decode: MhaDecode = op(
        reference="ds_runtime.ops.reference.attention.expanded:ReferenceMhaDecode",
        tolerance=_TOLERANCE,
        results={"run": lambda f, state, q, *_: of_heads(q, f.dims["v"])},
        by_sequence=True,
        heavy=True,
        layout="kv",
        chooses=True,
        waits=True,
        cost=Cost({"run": (_expanded_inputs, _mha_decode)}, step=("run",), size=by_heads),
        summary="attention over the paged cache of expanded keys and values",
    )
