"""What refuses a kernel of this plugin: gates that several offers share. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from ds_runtime.api import (
    FP8_GROUPS,
    OPS,
    Facts,
    Fixable,
    Gate,
    Kernel,
    checks,
    gates,
    install_command,
)
from ds_runtime_cuda.software import COMPILED, EXTRA, LIBRARIES, TOOLKIT

FP8, DENSE = frozenset({"fp8_block"}), frozenset({"dense"})
LATENT_PAGES = frozenset({"latent_pages.v1"})
SCALED_PAGES = frozenset({"latent_fp8_groups.v1"})
INDEX_PAGES = frozenset({"index_pages.v1"})
_CONTRACTS = {
    "mha_prefill": 2,
    "mla_absorb": 2,
    "mla_decode": 2,
}  # the version that each op's kernels are written for; else 1
BLOCK = 128
_DISTRIBUTION = {library.module: library.distributions[0] for library in LIBRARIES}


OWN = frozenset(  # adapters of no library
    {"torch_ops", "experts_streaming", "attention", "grouped_fp8", "packed12.linear"}
)


def gpu(facts: Facts) -> str | None:
    arch = facts.device.arch
    return None if arch.startswith("sm") else f"runs on NVIDIA GPUs, not on {facts.device.family}"


def arch(*wanted: str) -> Gate:
    return gates(gpu, checks.archs(*wanted))


def library(module: str, *functions: str) -> Gate:
    def check(facts: Facts) -> str | None:
        features = facts.device.features
        if module not in features:
            return Fixable(f"{_DISTRIBUTION[module]} is not installed", install_command(EXTRA))
        if f"{module}:mixed" in features:
            return f"two packages have been installed into {module}/: uninstall both, then one"
        missing = [f for f in functions if f"{module}.{f}" not in features]
        if missing:
            lacks = f"the installed {module} has no {', '.join(missing)}"
            return f"{lacks}; {install_command(EXTRA)} brings one"
        if module in COMPILED and not features & COMPILED[module]:
            said = f"{_DISTRIBUTION[module]} compiles its kernels by nvcc, and there is none"
            return Fixable(said, TOOLKIT)
        return None

    return check


_TRITON = library("triton")


def quantises(facts: Facts) -> str | None:
    """Around another library's kernel stand the plugin's own by Triton (jit.py and
    flash_mla_plan_device.py); where tensors are the host's, torch does their work."""
    return None if facts.device.type == "cpu" else _TRITON(facts)


def scaled_kv(facts: Facts) -> str | None:
    if facts.kv_dtype != FP8_GROUPS:
        said = f"reads a cache of {FP8_GROUPS}, not of {facts.kv_dtype}"
        return Fixable(said, "pass --kv-cache-dtype fp8")
    return None


def fp8_keys(facts: Facts) -> str | None:
    if facts.index_dtype != "float8_e4m3fn":
        said = f"scores float8_e4m3fn keys, not {facts.index_dtype}"
        return Fixable(said, "pass --index-cache-dtype fp8")
    heads, d = facts.dims.get("index_heads", 0), facts.dims.get("index_dim", 0)
    if heads > 64 or d not in (32, 64, 128):
        return f"takes up to 64 index heads of 32, 64 or 128 values, not {heads} of {d}"
    return None


def whole_pages(facts: Facts) -> str | None:
    size = facts.page_size
    if size & (size - 1) == 0:
        return None
    return Fixable(f"takes pages of a power of two of tokens, not {size}", "pass --page-size 64")


def few_chosen(facts: Facts) -> str | None:
    """What a captured step may choose: FILTERED_TOPK_MAX_K of the library's topk.cuh."""
    k = facts.dims.get("index_topk", 0)
    return None if k <= 2048 else f"chooses up to 2048 tokens, not {k}"


def sixteen_bytes(facts: Facts) -> str | None:
    odd = [n for n in facts.shape[1:] if n % 8]
    return f"needs rows of whole 16 bytes, and {odd[0]} values are none" if odd else None


_GROUPED = ("sm90", "sm100", "sm103")  # for which torch has a grouped matmul of its own


def queues(facts: Facts) -> str | None:
    """Elsewhere torch._grouped_mm reads where groups end and multiplies them one by one."""
    if facts.graph_capture and facts.device.arch not in _GROUPED:
        said = f"waits for the host on {facts.device.arch}, which no capture can"
        return Fixable(said, "pass --disable-graph")
    return None


def in_fours(facts: Facts) -> str | None:
    """Source: check_routing of the library's fused MoE."""
    count = facts.shape[0] if facts.shape else 0
    if count % 4 == 0:
        return None
    said = f"takes experts in fours, not {count}"
    return Fixable(said, "pass --disable-fusion shared_experts")


def column_pairs(facts: Facts) -> str | None:
    """csrc/grouped.cu multiplies two blocks of columns at a time."""
    hidden = facts.shape[-1] if facts.shape else 0
    return f"writes 256 columns at a time, and {hidden} are not" if hidden % 256 else None


def few_experts(facts: Facts) -> str | None:
    count = facts.shape[0] if facts.shape else 0
    if count <= 512:
        return None
    said = f"sorts tokens to up to 512 experts, not {count}"
    return Fixable(said, "pass --disable-fusion shared_experts")


_LARGE_MODEL = 2048  # hidden values from which kernels were measured against each other


def scales_on_chip(facts: Facts) -> str | None:
    wide = [n for n in facts.shape[1:] if n > 8192]
    return f"keeps the scales of up to 8192 columns on chip, not of {wide[0]}" if wide else None


def as_wide_as(width: int) -> Gate:
    """Where experts of large models are narrower, portable kernels have measured faster."""

    def gate(facts: Facts) -> str | None:
        inter, hidden = facts.shape[1:] if len(facts.shape) == 3 else (width, 0)
        if inter >= width or hidden < _LARGE_MODEL:
            return None
        return f"slower than portable kernels where experts are narrower than {width}, as {inter}"

    return gate


_MANY = 32  # experts, from which on a few tokens leave each of them a few rows


def many_experts(facts: Facts) -> str | None:
    """Bounds by tokens were measured where each chooses few of the experts of a large model."""
    count, hidden = (facts.shape[0], facts.shape[-1]) if facts.shape else (_MANY, 0)
    if count >= _MANY or hidden < _LARGE_MODEL:
        return None
    return f"slower than portable kernels where tokens share few experts, as {count}"


def multiplies_fp8(facts: Facts) -> str | None:
    if "float8_e4m3fn" in facts.device.fast_dtypes:
        return None
    return f"{facts.device.name} does not multiply float8_e4m3fn"


TILE, ROWS, COLUMNS = 12_416, 128, 64  # bytes, rows and columns of a tile of packed12.cuh
CODED = TILE / (ROWS * COLUMNS * 2)  # of bfloat16 weights, that they take in such tiles
OTHERS_AT, MOST_OTHERS = (
    14_352,
    448,
)  # bytes of a tile of fp8_compressed.cuh before its list, and entries
CODED_FP8 = (OTHERS_AT + 2 * MOST_OTHERS) / BLOCK**2  # of FP8 weights, that they take at most
_LARGE = 100_000_000  # elements of a weight that is worth a second form: a head's


def large(facts: Facts) -> str | None:
    rows, columns = facts.shape[-2:] or (_LARGE, COLUMNS)
    if rows * columns < _LARGE:
        return f"is for weights of {_LARGE:,} elements and more, not of {rows} × {columns}"
    return _whole_tiles(columns)


def not_large(facts: Facts) -> str | None:
    rows, columns = facts.shape[-2:] or (0, COLUMNS)
    if rows * columns >= _LARGE:
        return f"is for weights of fewer than {_LARGE:,} elements, not of {rows} × {columns}"
    return _whole_tiles(columns)


def _whole_tiles(columns: int) -> str | None:
    return None if columns % COLUMNS == 0 else f"needs rows of whole 64 values, not of {columns}"


EXPANDED = 256  # tokens from which kv_b is quicker multiplied in FP8
COPIED_KEYS = 1 << 20  # of an index, that are scored in a copy, at most


def copied_keys(facts: Facts, rows: int) -> int:
    """Bytes of the most index keys that are copied, with their scales, and of these two apart."""
    return 2 * COPIED_KEYS * (facts.dims["index_dim"] + 4)


def offer(
    op: str,
    fn: str,
    rank: int,
    *each: Gate,
    formats: frozenset[str] = frozenset(),
    layouts: frozenset[str] = LATENT_PAGES,
    graph_safe: bool = True,
    note: str = "",
    packing: str = "",
    from_rows: int = 0,
    below_rows: int = 0,
    ahead: str = "",
    by_rows: frozenset[str] = frozenset(),
    copies: float = 1,
    beside: float = 0,
    workspace: Callable[[Facts, int], int] | None = None,
) -> Kernel:
    fp8, module = formats == FP8, fn.partition(":")[0]
    return Kernel(
        op=OPS[op],
        fn=f"ds_runtime_cuda.{fn}",
        provider="cuda" if module in OWN else module,
        rank=rank,
        refuse=gates(gpu, *each),
        formats=formats,
        layouts=layouts if OPS[op].layout else frozenset(),
        phases=frozenset({"prefill", "decode", "verify"}),
        contract=_CONTRACTS.get(op, 1),
        graph_safe=graph_safe,
        note=note,
        numerics="fp8_w8a8" if fp8 else "",
        keeps=FP8 if fp8 else frozenset(),
        packing=packing,
        from_rows=from_rows,
        below_rows=below_rows,
        ahead=ahead and f"ds_runtime_cuda.{ahead}",
        by_rows=by_rows,
        copies=copies,
        beside=beside,
        workspace=workspace,
    )


BF16, HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
LATENT, HEADS_192 = checks.latent(512, 64), checks.head_dims(128, 64, 128)
EXPERT_BLOCKS = checks.expert_widths(BLOCK)
