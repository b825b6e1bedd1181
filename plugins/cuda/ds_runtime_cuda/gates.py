"""What refuses a kernel of this plugin: gates that several offers share. Torch-free."""

from __future__ import annotations

from ds_runtime.api import (
    FP8_GROUPS,
    RANK_PORTABLE,
    RANK_REFERENCE,
    Facts,
    Fixable,
    Gate,
    Library,
    Provider,
    checks,
    gates,
)
from ds_runtime_cuda.software import COMPILED, TOOLKIT, TRITON

RANK_BEHIND = (RANK_REFERENCE + RANK_PORTABLE) // 2  # before references, behind portable kernels
RANK_BESIDE = RANK_BEHIND - 2  # for some sizes, beside a kernel that serves the others
FP8, DENSE = {"fp8_block"}, {"dense"}
SCALED_PAGES = {"latent_fp8_groups.v1"}
BLOCK = 128
gpu = checks.devices("sm", "NVIDIA GPUs")
cuda, deep_gemm, flash_mla, flashinfer, flashinfer_cutlass, sgl_kernel = (
    Provider(
        name,
        "ds_runtime_cuda",
        gpu,
        numerics={"fp8_block": "fp8_w8a8"},
    )
    for name in (
        "cuda",
        "deep_gemm",
        "flash_mla",
        "flashinfer",
        "flashinfer_cutlass",
        "sgl_kernel",
    )
)


def arch(*wanted: str) -> Gate:
    return gates(gpu, checks.archs(*wanted))


def has(library: Library, *functions: str) -> Gate:
    """It is installed, has these functions, and finds what compiles its kernels."""
    brought, module = library.has(*functions), library.module

    def check(facts: Facts) -> str | None:
        said = brought(facts)
        if said is None and module in COMPILED and not facts.device.features & COMPILED[module]:
            said = f"{library.distribution} compiles its kernels by nvcc, and there is none"
            return Fixable(said, TOOLKIT)
        return said

    return check


_TRITON = TRITON.has()


def quantises(facts: Facts) -> str | None:
    """Around another library's kernel are the plugin's own by Triton (jit.py and
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
    return Fixable(said, "pass --fusion shared_experts=off")


def column_pairs(facts: Facts) -> str | None:
    """csrc/grouped.cu multiplies two blocks of columns at a time."""
    hidden = facts.shape[-1] if facts.shape else 0
    return f"writes 256 columns at a time, and {hidden} are not" if hidden % 256 else None


def few_experts(facts: Facts) -> str | None:
    count = facts.shape[0] if facts.shape else 0
    if count <= 512:
        return None
    said = f"sorts tokens to up to 512 experts, not {count}"
    return Fixable(said, "pass --fusion shared_experts=off")


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


SCALED_COLUMNS = 512  # inputs that cuBLAS multiplies together, with their scales
_MOST_COLUMNS = 24_576  # of eight tokens: half of their values are on chip


def scaled_columns(facts: Facts) -> str | None:
    columns = facts.shape[-1] if facts.shape else SCALED_COLUMNS
    if columns % SCALED_COLUMNS == 0:
        return None
    return f"takes {SCALED_COLUMNS} inputs at a time, and {columns} are no multiple of these"


def odd_columns(facts: Facts) -> str | None:
    if scaled_columns(facts) or not facts.shape:
        return None
    return f"is for other inputs than multiples of {SCALED_COLUMNS}, as {facts.shape[-1]} are"


def columns_on_chip(facts: Facts) -> str | None:
    columns = facts.shape[-1] if facts.shape else 0
    if columns <= _MOST_COLUMNS:
        return None
    return f"keeps tokens of up to {_MOST_COLUMNS} inputs on chip, not of {columns}"


EXPANDED = 256  # tokens from which kv_b is quicker multiplied in FP8
COPIED_KEYS = 1 << 20  # of an index, that are scored in a copy, at most


def copied_keys(facts: Facts, rows: int) -> int:
    """Bytes of the most index keys that are copied, with their scales, and of these two apart."""
    return 2 * COPIED_KEYS * (facts.dims["index_dim"] + 4)


BF16, HALVES = checks.dtypes("bfloat16"), checks.dtypes("bfloat16", "float16")
LATENT, HEADS_192 = checks.latent(512, 64), checks.head_dims(128, 64, 128)
EXPERT_BLOCKS = checks.expert_widths(BLOCK)
