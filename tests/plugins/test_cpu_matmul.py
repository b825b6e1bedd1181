"""Native matmuls over panels, every instruction set that runs here, against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from narrowing import using

from ds_runtime.ops.weight import Weight, WeightPart
from ds_runtime_cpu import absorb, linear, native, panels
from ds_runtime_cpu.platform import CpuPlatform
from ds_runtime_kit.checks.conformance import facts_for
from examples import examples

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}  # of a result
SUMMING = 3e-6  # relative to the sum of magnitudes: float32 in any order
DTYPES = sorted(ROUNDING, key=str)
BLOCK = 128
ISAS = native.runnable()
every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_form = pytest.mark.parametrize("form", ["dense", "dense12", "fp8", "fp4"])
fuzz = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def facts(dtype: torch.dtype, **dims: int):
    name = str(dtype).removeprefix("torch.")
    return facts_for(CpuPlatform().info(), name, **({"dims": dims} if dims else {}))


def check_dots(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """got [..., T, n] is x [..., T, k] times w [..., n, k] transposed, element by element."""
    x, w = x.double(), w.double().transpose(-1, -2)
    want, size = x @ w, x.abs() @ w.abs()
    assert got.shape == want.shape
    assert ((got - want).abs() <= 1.01 * ROUNDING[got.dtype] * want.abs() + SUMMING * size).all()


def dense(values: torch.Tensor) -> Weight:
    return Weight((WeightPart("w", "dense", tuple(values.shape), {"weight": values}),))


def fp8_part(rows: int, cols: int, offset=(0, 0), scale_dtype=torch.float32) -> WeightPart:
    """All finite codes, subnormal ones too, under scales that differ by block."""
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    codes[codes % 128 == 127] = 3
    grid = [-(-(n + o) // BLOCK) for n, o in zip((rows, cols), offset, strict=True)]
    scale = (torch.rand(*grid) + 0.5).to(scale_dtype)
    if scale_dtype == torch.uint8:
        scale = torch.randint(117, 123, grid, dtype=torch.uint8)  # exponents
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "scale": scale}
    return WeightPart("w", "fp8_block", (rows, cols), tensors, (BLOCK, BLOCK), offset)


def between_nans(tokens: int, k: int, dtype: torch.dtype, before: int, after: int):
    """Strided rows [tokens, k] with NaN before and after each."""
    wide = torch.full((tokens + 2, before + k + after), float("nan"), dtype=dtype)
    rows = wide[1 : tokens + 1, before : before + k]
    rows.copy_(torch.randn(tokens, k))
    return rows


def check_linear(weight: Weight, x: torch.Tensor, kept: bool = True):
    """`kept`: in its own format, else rounded to the compute dtype."""
    kernel = linear.LinearNative(facts(x.dtype))
    packed = kernel.pack(weight, facts(x.dtype))
    got = kernel.apply(x, packed)
    assert got.is_contiguous() and got.dtype == x.dtype
    check_dots(got, x, weight.dequantise(torch.float64 if kept else x.dtype))
    return packed


@every_isa
@every_dtype
@fuzz
@given(st.data())
def test_dense(isa, dtype, data):
    tokens, n = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 200))
    k = data.draw(st.integers(1, 700))
    values = (torch.randn(n, k) / k**0.5).to(dtype)
    x = between_nans(tokens, k, dtype, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)))
    with using(isa, narrow=data.draw(st.booleans())):
        packed = check_linear(dense(values), x)
        assert torch.equal(packed.dequantise(), values.float())


@every_isa
@every_dtype
@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 16, 17, 31, 95, 97, 257, 300])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 1024), (130, 1409)])
def test_many_tokens(isa, dtype, tokens, n, k):
    values = (torch.randn(n, k) / k**0.5).to(dtype)
    for narrow in (False, True):
        with using(isa, narrow):
            check_linear(dense(values), between_nans(tokens, k, dtype, 1, 2))
    with native.using(isa):
        check_linear(Weight((fp8_part(n, k),)), between_nans(tokens, k, dtype, 1, 2))


@every_isa
@every_dtype
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_fp8_nan_stays_in_its_column(isa, dtype, tokens, nan):
    part = fp8_part(150, 160)
    whole = part.tensors["weight"].clone()
    codes = part.tensors["weight"].view(torch.uint8)
    at = torch.randperm(150)[:40]
    codes[at, torch.randint(0, 160, (40,))] = nan
    x = torch.randn(tokens, 160).to(dtype)
    with native.using(isa):
        kernel = linear.LinearNative(facts(dtype))
        packed = kernel.pack(Weight((part,)), facts(dtype))
        got = kernel.apply(x, packed)
        assert torch.equal(packed.dequantise().isnan(), codes % 128 == 127)
        plain = replace(part, tensors=part.tensors | {"weight": whole})
        want = kernel.apply(x, kernel.pack(Weight((plain,)), facts(dtype)))
    assert got[:, at].isnan().all() and not want.isnan().any()
    others = torch.ones(150, dtype=torch.bool).index_fill(0, at, False)
    assert torch.equal(got[:, others], want[:, others])


@every_isa
@every_dtype
@fuzz
@given(st.data())
def test_fp8(isa, dtype, data):
    """Parts, partial blocks, shards that cut blocks finely and coarsely, every kind of scale."""
    col0 = data.draw(st.sampled_from([0, 32, 64, 96, 37, 101]))
    k = data.draw(st.integers(1, 600))
    scale_dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    rows = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    parts = [
        fp8_part(n, k, (data.draw(st.integers(0, BLOCK - 1)), col0), scale_dtype) for n in rows
    ]
    x = between_nans(data.draw(st.integers(0, 20)), k, dtype, 1, data.draw(st.integers(0, 3)))
    with native.using(isa):
        packed = check_linear(Weight(tuple(parts)), x, col0 % 32 == 0)
    if col0 % 32 == 0:
        bytes_per_weight = packed.nbytes / (-(-sum(rows) // 64) * 64 * -(-k // 32) * 32)
        assert 1 <= bytes_per_weight <= 1 + 4 / 32 + 4 / k  # codes, and their scales
        want = Weight(tuple(parts)).dequantise(torch.float32)
        assert torch.equal(packed.dequantise(), want)


def fp4_part(rows: int, cols: int, col0=0, scale_dtype=torch.uint8) -> WeightPart:
    """All codes under powers of two."""
    scale = torch.randint(110, 130, (rows, -(-(cols + col0) // 32)), dtype=torch.uint8)
    if scale_dtype.itemsize > 1:
        scale = torch.exp2(scale.double() - 127).to(scale_dtype)
    tensors = {"weight": torch.randint(0, 16, (rows, cols), dtype=torch.uint8)}
    tensors["scale"] = scale.view(scale_dtype) if scale_dtype.itemsize == 1 else scale
    return WeightPart("w", "mxfp4", (rows, cols), tensors, (1, 32), (0, col0))


@every_isa
@every_dtype
@fuzz
@given(st.data())
def test_fp4(isa, dtype, data):
    """Parts that end within a panel, partial groups, shards that cut groups, kinds of scales."""
    col0, k = data.draw(st.sampled_from([0, 32, 5])), data.draw(st.integers(1, 600))
    kinds = [torch.uint8, torch.float8_e8m0fnu, torch.float32, torch.bfloat16]
    rows = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from(kinds))
    weight = Weight(tuple(fp4_part(n, k, col0, kind) for n in rows))
    x = between_nans(data.draw(st.integers(0, 20)), k, dtype, 1, data.draw(st.integers(0, 3)))
    with native.using(isa):
        packed = check_linear(weight, x, col0 % 32 == 0)
        if col0 % 32 == 0:
            assert torch.equal(packed.dequantise(), weight.dequantise(torch.float32))
            panels = -(-sum(rows) // 64) * -(-k // 32)
            assert packed.nbytes == panels * (64 + 64 * 16)


@every_isa
def test_every_fp4_scale(isa):
    """The byte 255 means NaN, which no part has."""
    tensors = {
        "weight": torch.arange(16, dtype=torch.uint8).repeat(255, 1),
        "scale": torch.arange(255, dtype=torch.uint8).view(255, 1),
    }
    weight = Weight((WeightPart("w", "mxfp4", (255, 16), tensors, (1, 32)),))
    with native.using(isa):
        kernel = linear.LinearNative(facts(torch.float32))
        packed = kernel.pack(weight, facts(torch.float32))
        assert torch.equal(packed.dequantise(), weight.dequantise(torch.float32))


@every_isa
def test_fp4_with_scales_that_are_no_powers_is_converted(isa):
    part = fp4_part(70, 64, scale_dtype=torch.float32)
    for wrong in (1.5, -2.0, 0.0):
        scale = part.tensors["scale"].clone()
        scale[69, 1] = wrong
        weight = Weight((replace(part, tensors=part.tensors | {"scale": scale}),))
        with native.using(isa):
            packed = check_linear(weight, torch.randn(3, 64))
        assert packed.nbytes >= 4 * 70 * 64


@every_isa
@every_dtype
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_every_fp8_code(isa, dtype, tokens):
    """One code per column: y is its value, NaN is NaN, and in no other column."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1)
    part = WeightPart(
        "w", "fp8_block", (256, 1), {"weight": codes, "scale": torch.ones(2, 1)}, (BLOCK, BLOCK)
    )
    with native.using(isa):
        kernel = linear.LinearNative(facts(dtype))
        packed = kernel.pack(Weight((part,)), facts(dtype))
        y = kernel.apply(torch.ones(tokens, 1, dtype=dtype), packed)
    want = codes.float().view(1, 256).expand(tokens, 256).to(dtype)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(), want.nan_to_num())


@every_isa
@every_dtype
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("narrow", [False, True])
def test_nan_comes_through(isa, dtype, tokens, narrow):
    """A fault in one weight or one activation spoils its column or its row alone."""
    values, x = torch.randn(70, 129).to(dtype), torch.randn(tokens, 129).to(dtype)
    values[66, 128] = x[-1, 3] = float("nan")
    with using(isa, narrow):
        kernel = linear.LinearNative(facts(dtype))
        y = kernel.apply(x, kernel.pack(dense(values), facts(dtype)))
    spoilt = torch.zeros(tokens, 70, dtype=torch.bool)
    spoilt[:, 66] = spoilt[-1] = True
    assert torch.equal(y.isnan(), spoilt)


@every_isa
@every_dtype
@every_form
@pytest.mark.parametrize(("n", "k"), [(515, 2048), (36, 8192), (1100, 30)])
def test_a_row_depends_on_nothing_but_itself(isa, dtype, form, n, k):
    """Neither on the number of threads nor on the other tokens of the batch, to the bit."""
    coded = {"fp8": fp8_part, "fp4": fp4_part}.get(form)
    weight = Weight((coded(n, k),)) if coded else dense(torch.randn(n, k).to(dtype))
    x = torch.randn(130, k).to(dtype)
    x[0] *= 1e-39  # subnormal, which some units take for zeros: then all must
    before = torch.get_num_threads()
    try:
        with using(isa, form == "dense12"):
            kernel = linear.LinearNative(facts(dtype))
            packed = kernel.pack(weight, facts(dtype))
            want = kernel.apply(x, packed)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for tokens in (1, 2, 5, 13, 130):
                    got = kernel.apply(x[:tokens], packed)
                    assert torch.equal(got, want[:tokens]), (threads, tokens)
    finally:
        torch.set_num_threads(before)


@every_isa
@pytest.mark.parametrize("code", ["float32", "bfloat16", "fp8"])
@fuzz
@given(st.data())
def test_packing(isa, code, data):
    """Rows in parts and columns in any order of memory; what is not a value is zero."""
    n, k = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 300))
    cut = data.draw(st.integers(0, n - 1))
    scales = None
    if code == "fp8":
        form = panels.Form(1, torch.bfloat16, data.draw(st.sampled_from([32, 64, 128])))
        part = fp8_part(n, k)
        values, scales = part.tensors["weight"], torch.rand(n, -(-k // form.group))
    else:
        form = panels.dense(getattr(torch, code))
        values = torch.randn(n, k).to(form.dtype)
    if data.draw(st.booleans()):
        values = values.T.contiguous().T  # k is the outer dimension
    with native.using(isa):
        packed = form.empty(1, n, k)[0].fill_(255)
        for first, last in ((0, cut), (cut, n)):
            rows = slice(first, last)
            form.pack(packed, values[rows], None if scales is None else scales[rows], first, n)
        got = form.unpack(packed, n, k)
    want = values.float()
    if scales is not None:
        want = want * scales.repeat_interleave(form.group, 1)[:, :k]
        extra = scales.contiguous().view(torch.uint8).count_nonzero()
    else:
        extra = 0
    assert torch.equal(got, want)
    bits = values.contiguous().view(torch.uint8)
    used = (bits if code != "fp8" else bits * (bits != 0x80)).count_nonzero() + extra
    assert packed.count_nonzero() == used  # of FP8, -0 is stored as 0


DIMS = [
    {"heads": 3, "qk_nope": 16, "qk_rope": 8, "v": 12, "kv_lora": 32},
    {"heads": 5, "qk_nope": 52, "qk_rope": 8, "v": 70, "kv_lora": 131},
    {"heads": 4, "qk_nope": 128, "qk_rope": 64, "v": 128, "kv_lora": 512},
    {"heads": 2, "qk_nope": 192, "qk_rope": 64, "v": 128, "kv_lora": 512},
]


@every_isa
@every_dtype
@every_form
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: str(d["kv_lora"]))
@pytest.mark.parametrize("tokens", [0, 1, 4, 37])
def test_absorb(isa, dtype, form, dims, tokens):
    heads, nope, v, lora = (dims[n] for n in ("heads", "qk_nope", "v", "kv_lora"))
    rows = heads * (nope + v)
    weight = Weight((fp8_part(rows, lora, (0, 0)),))
    if form != "fp8":
        weight = dense((torch.randn(rows, lora) / lora**0.5).to(dtype))
    kept = form == "fp8" and (nope + v) % 32 == 0
    values = weight.dequantise(torch.float64 if kept else dtype).view(heads, nope + v, lora)
    q = between_nans(tokens * heads, nope, dtype, 3, 4).unflatten(0, (tokens, heads))
    rope = dims["qk_rope"]
    q_rope = between_nans(tokens * heads, rope, dtype, 1, 2).unflatten(0, (tokens, heads))
    x = torch.randn(heads, tokens, lora).to(dtype).transpose(0, 1)
    latent = between_nans(tokens, lora, dtype, 1, 0)
    with using(isa, form == "dense12"):
        kernel = absorb.MlaAbsorbNative(facts(dtype, **dims))
        packed = kernel.pack(weight, facts(dtype, **dims))
        whole, got_v = kernel.apply_q(q, q_rope, packed), kernel.apply_v(x, packed)
        got_k, got_e = kernel.expand(latent, packed)
        want = weight.dequantise(torch.float32 if kept else dtype)
        assert torch.equal(packed.dequantise(), want.float())
    uk, uv = values[:, :nope], values[:, nope:]
    got_q, behind = whole.split((lora, rope), 2)
    assert torch.equal(behind, q_rope)
    check_dots(got_q.transpose(0, 1), q.transpose(0, 1), uk.transpose(1, 2))
    check_dots(got_v.transpose(0, 1), x.transpose(0, 1), uv)
    check_dots(got_k.transpose(0, 1), latent, uk)
    check_dots(got_e.transpose(0, 1), latent, uv)
    if lora == 512:  # padding is little
        size = 1 + 4 / gcd(BLOCK, nope + v) if form == "fp8" else dtype.itemsize
        weights = heads * (2 * nope + v) * lora  # W_UK twice, W_UV once
        if form == "dense12" and dtype == torch.bfloat16:
            assert 1.5 * weights < packed.nbytes < 1.53 * weights
        else:
            assert packed.nbytes == weights * size


@every_isa
@pytest.mark.parametrize("k", [1, 70])
def test_columns_need_not_be_contiguous(isa, k):
    """Results of transposed activations, and of one column whose stride means nothing."""
    torch.manual_seed(4)
    weight, x = dense(torch.randn(80, k)), torch.randn(k, 5).T
    with native.using(isa):
        kernel = linear.LinearPanels(facts(torch.float32))
        packed = kernel.pack(weight, facts(torch.float32))
        got, none = kernel.apply(x, packed), kernel.apply(x[:0], packed)  # of no token, too
    check_dots(got, x, weight.dequantise())
    assert none.shape == (0, 80)


def test_absorb_follows_the_blocks_of_a_shard():
    """A rank's heads may begin inside a block of rows: then scales change inside a head."""
    dims = {"heads": 2, "qk_nope": 128, "qk_rope": 64, "v": 64, "kv_lora": 256}
    weight = Weight((fp8_part(2 * 192, 256, (64, 0)),))
    kernel = absorb.MlaAbsorbNative(facts(torch.float32, **dims))
    packed = kernel.pack(weight, facts(torch.float32, **dims))
    values = weight.dequantise(torch.float64).view(2, 192, 256)
    q = torch.randn(3, 2, 128)
    assert packed.nbytes < 2 * values.numel()
    got = kernel.apply_q(q, torch.randn(3, 2, 64), packed)[..., :256]
    check_dots(got.transpose(0, 1), q.transpose(0, 1), values[:, :128].transpose(1, 2))
    assert torch.equal(packed.dequantise(), weight.dequantise(torch.float32))
