"""Contracts of attention over chosen tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ds_runtime.ops.contracts.results import of_heads
from ds_runtime.ops.contracts.work import by_latent
from ds_runtime.ops.declare import Area, Cost, OpWork, later, op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ds_runtime.ops.contract import Facts
    from ds_runtime.ops.contracts.work import Sizes
    from ds_runtime.ops.reference.cases import Case
    from ds_runtime.ops.reference.inputs import TrueInputs

torch = later("torch")
cases = later("ds_runtime.ops.reference.cases")


class SparseMla(Protocol):
    """Absorbed MLA over chosen slots of the paged latent cache.

    * q: [rows, heads, kv_lora + rope] (absorbed latent part, then rotated rope part).
    * cache: one layer in the bound KV layout.
    * slots: [rows, n] int32, any n ≥ 1. The slots of a row are distinct. Negative ones are padding
      and may be anywhere.
    * kv_lora: width of the latent.

    Softmax in fp32 of q·k·scale over a row's slots. Returns [rows, heads, kv_lora] in q.dtype, with
    0 for a row without slots. Slots that are not named may hold NaN. 0 rows is legal.
    """

    def __call__(
        self, q: Tensor, cache: Tensor, slots: Tensor, kv_lora: int, scale: float
    ) -> Tensor: ...


def sparse_mla_samples(facts: Facts) -> Iterator[Case]:
    """Shuffled slots, few and many, −1 in the middle and at the end, rows without any."""
    page, heads = facts.page_size, facts.dims["heads"]
    kv_lora = facts.dims["kv_lora"]
    width = kv_lora + facts.dims["qk_rope"]
    for label, lens, n, missing in (
        ("no rows", (), 4, 0),
        ("one slot", (1,), 1, 0),
        ("page edges", (page, page + 1, 2 * page, 1), 2 * page, 0),
        ("fewer than n", (3, 70, 1), 64, 0),
        ("holes", (90, 3 * page + 2, 130), 64, 9),
        ("many", (300, 100), 128, 1),
    ):
        make = cases.Maker(facts, label)
        cache, table = make.paged(lens)
        slots = torch.full((len(lens), n), -1, dtype=torch.int32)
        for i, length in enumerate(lens):
            tokens = make.order(length)[:n]
            chosen = table[i][tokens // page] * page + tokens % page
            slots[i, : len(tokens)] = chosen.to(torch.int32)
            slots[i, make.order(n)[:missing]] = -1
        if label == "fewer than n":
            slots[1] = -1
        q = make.normal(len(lens), heads, width, scale=2)
        yield cases.case(label, facts, q, cache, slots, kv_lora, width**-0.5)


def _inputs(p: TrueInputs, tokens: int) -> tuple[Any, ...]:
    (heads, lora, rope), size = p.dims("heads", "kv_lora", "qk_rope"), p.facts.page_size
    table, owners, lens = p.rows(tokens)
    longest = p.context + tokens * p.prompt
    draws = torch.rand(tokens, longest, device=p.device)
    draws.masked_fill_(p.positions(longest) >= lens.unsqueeze(1), -1.0)
    drawn, chosen = draws.topk(min(longest, p.facts.dims["index_topk"]))
    slots = table[owners.long().unsqueeze(1), chosen // size] * size + chosen % size
    slots = slots.masked_fill(drawn < 0, -1).to(torch.int32)
    q = p.normal(tokens, heads, lora + rope)
    cache = p.in_turn(lambda: p.cache(table.numel()))
    return q, cache, slots, lora, (lora + rope) ** -0.5


def _work(s: Sizes, tokens: int) -> OpWork:
    heads, lora, rope = s.dims("heads", "kv_lora", "qk_rope")
    seen, width = s.seen(tokens, s.facts.dims["index_topk"]), lora + rope
    read = min(seen, s.cached_rows(tokens))  # rows of a prompt choose the same tokens over and over
    return OpWork(
        reads=tokens * heads * width * s.item + 4 * seen,
        writes=tokens * heads * lora * s.item,
        flops=2.0 * seen * heads * (width + lora),
        cached=read * width * s.kept,
    )


_SAID: dict[str, Any] = {
    "reference": "ds_runtime.ops.reference.attention.sparse:sparse_mla",
    "samples": f"{__name__}:sparse_mla_samples",
    "tolerance": {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 3e-3},
    "results": {"": lambda f, q, cache, slots, width, scale: of_heads(q, width)},
    "rows": {"": (0, 2)},
    "heavy": True,
    "layout": "kv",
}


class SparseOps(Area):
    """Attention over the slots that an indexer chose."""

    sparse_prefill: SparseMla = op(
        **_SAID,
        cost=Cost({"": (_inputs, _work)}, size=by_latent, chooses=True),
        summary="absorbed attention over chosen tokens, for prefill rows",
    )
    sparse_decode: SparseMla = op(
        **_SAID,
        chooses=True,
        cost=Cost({"": (_inputs, _work)}, step=("",), size=by_latent, chooses=True),
        summary="absorbed attention over chosen tokens, for decode rows",
    )
