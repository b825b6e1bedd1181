"""Which kernel serves which op in which format on which described device. Torch-free; runs nothing.

`matrix` asks every kernel at one site per op, weight format, compute dtype and cache dtype.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from ds_runtime.ops.binding.bind import refusal
from ds_runtime.ops.contract import Dims, Facts, Kernel
from ds_runtime.ops.table import OPS
from ds_runtime.plugins.described_devices import described
from ds_runtime.plugins.manager import Plugins

DTYPES = ("bfloat16", "float16", "float32")
_FP8 = "float8_e4m3fn"
# DeepSeek-V3 on eight ranks.
DIMS = Dims(
    {"hidden": 7168, "heads": 16, "q_lora": 1536, "kv_lora": 512, "qk_nope": 128, "qk_rope": 64}
    | {"v": 128, "intermediate": 2304, "moe_intermediate": 256, "experts": 256, "top_k": 8}
    | {"vocab": 129280, "layers": 61, "index_heads": 64, "index_dim": 128, "index_topk": 2048}
)
# Of the weight, where a gate looks at it; formats are those that any kernel of the op declares.
SHAPES = {"linear": (7168, 2048), "mla_absorb": (4096, 512), "experts": (256, 256, 7168)}
SHAPES["mla_inputs"] = (2112, 7168)
SHAPES |= {"experts_limited": SHAPES["experts"], "grouped_linear": (1024, 4096)}
PAGE_SIZE = 64
APART = (
    (
        "trees of drafts (`--speculative-eagle-topk` above 1)",
        "`--batch-invariant`",
        "a tree's nodes and an answer's tokens have other places in the cache, so attention adds "
        "them in another order",
    ),
    (
        "keys and values in the cache (`--disable-mla`)",
        "`--batch-invariant`",
        "prompts have to attend as decode steps do, and no kernel of `mha_decode` computes each "
        "row by itself",
    ),
    (
        "keys and values in the cache (`--disable-mla`)",
        "sparse attention (DeepSeek-V3.2)",
        "kernels of sparse attention read latents",
    ),
)
"""What does not go together, in pairs, and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """Where a kernel serves an op in one format ("" if the op owns no weight): dtype → devices.

    A dtype is the compute dtype, with "/fp8" for an FP8 cache. own_bits: --batch-invariant may bind
    it. any_part: --ep above 1 may.
    """

    op: str
    kernel: str
    rank: int
    format: str
    devices: dict[str, list[str]]
    own_bits: bool = False
    any_part: bool = False


def matrix(plugins: Plugins, wanted: Collection[str] = ()) -> Iterator[Row]:
    """A row per op, kernel and format that is served anywhere, best ranks first; of all plugins,
    or of those `wanted`."""
    found: dict[tuple[str, str, str], Row] = {}
    for name, platform in described(plugins):
        device = platform.info(0)
        for dtype in DTYPES:
            for kv_dtype in (dtype, _FP8):
                facts = Facts(device, DIMS, dtype, kv_dtype, PAGE_SIZE, index_dtype=kv_dtype)
                for kernel in plugins.offers(replace(facts, batch_invariant=True)).kernels:
                    mine = not wanted or plugins.owners[kernel.provider] in wanted
                    if mine and (kv_dtype == dtype or OPS[kernel.op.name].layout):
                        _ask(kernel, facts, name, found)
    order = {op: i for i, op in enumerate(OPS)}
    return iter(sorted(found.values(), key=lambda r: (order[r.op], -r.rank, r.kernel, r.format)))


def _ask(kernel: Kernel, base: Facts, device: str, found: dict[tuple[str, str, str], Row]) -> None:
    op = kernel.op.name
    dtype = base.dtype + ("/fp8" if base.kv_dtype == _FP8 else "")
    for fmt in sorted(kernel.formats) or ("",):
        facts = replace(base, weight_format=fmt, shape=SHAPES.get(op, ()))
        if refusal(kernel, facts) is None:
            says = kernel.promises.batch_invariant, kernel.promises.skips_absent
            row = Row(op, kernel.name, kernel.rank, fmt, {}, *says)
            row = found.setdefault((op, kernel.name, fmt), row)
            row.devices.setdefault(dtype, []).append(device)


def as_json(rows: Iterable[Row]) -> str:
    """A list of rows."""
    return json.dumps([asdict(r) for r in rows], indent=1) + "\n"


HEAD = """\
# Which kernel runs where

Each table is about one op. It says which kernel accepts which weight format on which described
device. The best kernels come first. Formats with the same devices share a row.

Nothing ran to make these tables. Every kernel was asked about DeepSeek-V3 on eight ranks, with
pages of {page} tokens and the software that the devices' files name. For another model,
`ds-runtime plan --device X` prints the kernels that a start would bind.

| mark | means |
|---|---|
| `/fp8` | with an FP8 cache |
| *unrun* | no kernel ran on the device. Its rows follow what its vendor and the libraries publish |
| *own bits* | `--batch-invariant` may bind the kernel ([batch-invariant.md](batch-invariant.md)) |
| *any part* | `--ep` above 1 may bind the kernel, because it skips experts of other ranks |

## What does not go together

Any two of these work together: `--tp`, `--ep`, `--enable-dp-attention`, drafts, captured steps, the
prefix cache, adapters, an FP8 cache, grammars, sparse attention, `--batch-invariant`. The table has
the exceptions.

* Two ranks over Gloo return the answers of one rank (`tests/e2e/test_pairs.py`).
* On two H200s, six runs in float32 return the answers of one device
  (`tests/e2e/test_pairs_on_device.py`). They cover DP attention, `--ep` and drafts, each with every
  other feature except an FP8 cache.
* On two H200s, three runs had FP8 weights. Two of them return the answers of one device, except
  where two tokens are almost equally likely. The third had trees, DP attention and an FP8 cache.
  Its answers differ by more, and the reason is not known.

| this | and this | why |
|---|---|---|
{apart}

On GPUs, sparse attention works with an FP8 cache or with `--batch-invariant`, but not with both.
Its kernels that compute each row by itself read no FP8 cache. The start then ends with an error
that names the kernels.
"""


def as_markdown(rows: Iterable[Row], plugins: Plugins) -> str:
    """A page: what devices there are, then a table per op, kernels and formats down, dtypes
    across."""
    found = dict(described(plugins))
    devices = {name: platform.info(0) for name, platform in found.items()}
    apart = "\n".join(f"| {' | '.join(said)} |" for said in APART)
    head = HEAD.format(page=PAGE_SIZE, apart=apart)
    lines = [head, "## Devices", "", "| device | model, architecture |", "|---|---|"]
    for name, info in devices.items():
        unrun = ", *unrun*" if found[name].unrun else ""
        lines.append(f"| {name} | {info.name}, {info.arch}{unrun} |")
    columns = [d + cache for d in DTYPES for cache in ("", "/fp8")]
    for op, mine in groupby(rows, key=lambda r: r.op):
        used = [c for c in columns if OPS[op].layout or "/" not in c]
        lines += ["", f"## {op}", "", f"| kernel | format | {' | '.join(used)} |"]
        lines.append("|---|---|" + "---|" * len(used))
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in mine:
            cells = tuple(_cell(row.devices.get(c, []), devices) for c in used)
            marks = (row.own_bits, "*own bits*"), (row.any_part, "*any part*")
            name = ", ".join([row.kernel, *(mark for has, mark in marks if has)])
            alike.setdefault((name, *cells), []).append(row.format or "–")
        for (kernel, *said), formats in alike.items():
            lines.append(f"| {kernel} | {', '.join(formats)} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def _cell(served: Collection[str], every: Collection[str]) -> str:
    if served and len(served) == len(every):
        return "all"
    return ", ".join(served) or "–"
