"""Binding: ranks, refusals, pins, layouts and fusions, decided from offers made on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from faulty import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.assembly.estimate import second_form_of
from ds_runtime.assembly.plan import Plan, check_against, difference, make_rows
from ds_runtime.description.hf import load_config
from ds_runtime.description.sites import INPUTS, model_sites
from ds_runtime.errors import ConfigError, PluginError, UnsupportedError
from ds_runtime.ops.binding.bind import Binding, decide_all, refusal
from ds_runtime.ops.binding.bound import BoundOps, _say_plain
from ds_runtime.ops.binding.by_rows import shares_of
from ds_runtime.ops.binding.pins import Pin
from ds_runtime.ops.contract import DeviceInfo, Dims, Facts, Kernel, Offers, Site
from ds_runtime.ops.kernel import Footprint, Layout, Promises, RowRange
from ds_runtime.ops.reference.layouts import LATENT_PAGES
from ds_runtime.ops.table import OPS
from ds_runtime.ops.weight import Packed
from ds_runtime.plugins.manager import load_plugins

BASE = Facts(
    DeviceInfo("cpu", "any", "any"),
    Dims({"hidden": 64, "heads": 4, "kv_lora": 32, "qk_rope": 8, "qk_nope": 16, "v": 16}),
)
REFERENCE = load_plugins(["cpu"]).offers(BASE)
REFERENCE = replace(
    REFERENCE, kernels=tuple(k for k in REFERENCE.kernels if k.provider == "reference")
)
KV = frozenset({LATENT_PAGES.tag})
OTHER = Layout("other", 1, "nowhere:allocate", lambda facts: 1)
Refuse = Callable[[Facts], str | None]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> list[Site]:
    folder = tiny_config(tmp_path_factory.mktemp("m"))
    return model_sites(load_config(folder), lambda module: "dense")


BESIDE = Footprint(second_form=0.75)


def asking(first, below=0, bits=""):
    """For calls of so many rows of the shared packing."""
    return RowRange("rows.v9", first, below, bits=bits)


def kernel(op: str, provider: str = "mine", rank: int = 20, **more: object) -> Kernel:
    if op in ("linear", "experts", "mla_absorb"):
        more.setdefault("formats", frozenset({"dense"}))
    if OPS[op].layout:
        more.setdefault("layouts", KV)
    return Kernel(OPS[op], f"{provider}_kernels:{op}", provider, rank, **more)  # type: ignore[arg-type]


def bind(
    sites: list[Site],
    *kernels: Kernel,
    pins: tuple[str, ...] = (),
    third: frozenset[str] = frozenset(),
    layouts: tuple[Layout, ...] = (),
    base: Facts = BASE,
) -> Binding:
    offers = Offers((*REFERENCE.kernels, *kernels), (*REFERENCE.layouts, *layouts), (), third)
    return decide_all(sites, offers, base, Pin.parse_all(pins))


def chosen(binding: Binding, op: str) -> set[str]:
    return {d.kernel for d in binding.decisions if d.op == op}


def decisions(binding: Binding, op: str) -> list[object]:
    return [d for d in binding.decisions if d.op == op]


def test_without_other_offers_every_site_has_a_reference_or_a_composition(sites) -> None:
    binding = bind(sites)
    assert {d.provider for d in binding.decisions} == {"reference", "core"}
    assert {(s.op, s.layer, s.module) for s in sites} <= {
        (d.op, d.site.layer, d.site.module) for d in binding.decisions
    }
    assert chosen(binding, "mla_prologue") == chosen(binding, "add_rms_norm") == {"composed"}


def test_the_highest_rank_wins_and_the_losers_are_told(sites) -> None:
    found = bind(sites, kernel("rms_norm", "a", 10), kernel("rms_norm", "b", 30))
    for d in decisions(found, "rms_norm"):
        assert d.kernel == "b.rms_norm"
        assert d.lost == (("a.rms_norm", 10), ("reference.rms_norm", 0))


@pytest.mark.parametrize("order", [1, -1])
def test_equal_ranks_go_to_the_third_party_then_by_name(sites, order: int) -> None:
    offered = [kernel("rms_norm", p) for p in ("aa", "bb", "zz")][::order]
    assert chosen(bind(sites, *offered, third=frozenset({"zz"})), "rms_norm") == {"zz.rms_norm"}
    assert chosen(bind(sites, *offered), "rms_norm") == {"aa.rms_norm"}


def test_a_refusal_is_kept_word_for_word_and_the_next_serves(sites) -> None:
    best = kernel("route", refuse=lambda facts: "needs matrix units; this one has none")
    found = bind(sites, best)
    assert chosen(found, "route") == {"reference.route"}
    said = {d.refused for d in decisions(found, "route")}
    assert said == {(("mine.route", "needs matrix units; this one has none"),)}


def _fails(facts: Facts) -> str | None:
    raise KeyError("warp")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"contract": 2}, "written for contract 2 of linear, this runtime has 1"),
        ({"formats": frozenset({"int4"})}, "does not read weight format 'dense'; it reads int4"),
        ({"formats": frozenset()}, "it reads none"),
        ({"refuse": _fails}, "its refuse() raised KeyError: 'warp'"),
        ({"refuse": lambda facts: False}, "its refuse() returned False, not None or a sentence"),
        ({"refuse": lambda facts: ""}, "its refuse() returned '', not None or a sentence"),
    ],
)
def test_what_is_not_declared_is_refused(sites, more: dict[str, object], said: str) -> None:
    found = bind(sites, kernel("linear", **more))
    assert chosen(found, "linear") == {"reference.ReferenceLinear"}
    for d in decisions(found, "linear"):
        assert said in dict(d.refused)["mine.linear"]


@pytest.mark.parametrize(
    ("fact", "declared", "said"),
    [
        ("deterministic", "deterministic", "not deterministic: leave --deterministic out"),
        ("graph_capture", "graph_safe", "not safe under graph capture: pass --disable-graph"),
    ],
)
def test_requirements_of_the_process(sites, fact: str, declared: str, said: str) -> None:
    embed = Site("embed", -1, "embed_tokens")
    offers = [kernel("embed", promises=Promises(**{declared: False}))]
    decode = [s for s in sites if s.op == "mla_decode"][:1]
    safe = kernel("mla_decode", "safe")
    assert chosen(bind([*decode, embed], *offers, safe), "embed") == {"mine.embed"}
    found = bind([*decode, embed], *offers, safe, base=replace(BASE, **{fact: True}))
    assert chosen(found, "embed") == {"reference.embed"}
    assert dict(decisions(found, "embed")[0].refused) == {"mine.embed": said}


def test_a_kernel_for_one_phase_serves_that_phase_only(sites) -> None:
    found = bind(sites, kernel("mla_decode", phases=frozenset({"prefill"})))
    assert chosen(found, "mla_decode") == {"reference.ReferenceMlaDecode"}
    assert "does not serve the decode phase" in str(decisions(found, "mla_decode")[0].refused)


# pins


def test_a_pin_beats_ranks_at_the_sites_that_it_names(sites) -> None:
    found = bind(
        sites, kernel("linear", "fast", 30), pins=("linear@*.o_proj=reference.ReferenceLinear",)
    )
    for d in decisions(found, "linear"):
        pinned = d.site.module.endswith("o_proj")
        assert d.kernel == ("reference.ReferenceLinear" if pinned else "fast.linear")


def test_a_pin_by_provider_and_a_pin_on_a_fusion(sites) -> None:
    found = bind(sites, kernel("rms_norm"), pins=("rms_norm=reference", "mla_prologue=reference"))
    assert chosen(found, "rms_norm") == {"reference.rms_norm"}
    assert chosen(found, "mla_prologue") == {"reference.mla_prologue"}


def test_a_provider_pin_takes_the_provider_s_kernel_that_accepts(sites) -> None:
    no = kernel("linear", "mine", 40, refuse=lambda facts: "only on Tuesdays")
    yes = replace(kernel("linear", "mine", 5), fn="mine_kernels:slow_linear")
    found = bind(sites, no, yes, kernel("linear", "other", 30), pins=("linear=mine",))
    assert chosen(found, "linear") == {"mine.slow_linear"}


def test_pins_of_the_same_sites_must_agree(sites) -> None:
    offered = kernel("linear", "mine"), kernel("linear", "other", 30)
    with pytest.raises(ConfigError, match=r"'linear=other': the same sites .* to 'mine' already"):
        bind(sites, *offered, pins=("linear=mine", "linear=other"))
    twice = bind(sites, *offered, pins=("linear@*.o_proj=mine", "linear=other", "linear=other"))
    assert chosen(twice, "linear") == {"mine.linear", "other.linear"}


def test_a_pin_that_counts_nowhere_is_refused(sites) -> None:
    offered = kernel("linear", "mine"), kernel("linear", "other", 30)
    said = (
        r"--pin linear@\*.o_proj=other: counts nowhere, as --pin linear=mine comes first at layers"
    )
    with pytest.raises(ConfigError, match=said):
        bind(sites, *offered, pins=("linear=mine", "linear@*.o_proj=other"))
    flag = "--attention-backend 'other'"
    both = [Pin("linear", "*", "other", flag), Pin("rope", "*", "reference", flag)]
    offers = replace(REFERENCE, kernels=(*REFERENCE.kernels, *offered))
    pins = [Pin("linear", "*", "mine"), *both]
    found = decide_all(sites, offers, BASE, pins)  # it counts for the other op
    assert chosen(found, "linear") == {"mine.linear"}
    with pytest.raises(ConfigError, match=rf"{flag}: counts nowhere, as --pin linear=mine comes"):
        decide_all(sites, offers, BASE, pins[:2])
    same = bind(sites, *offered, pins=("linear=mine", "linear@*.o_proj=mine.linear"))
    assert chosen(same, "linear") == {"mine.linear"}


def test_a_part_that_is_pinned_to_a_provider_keeps_its_fusion(sites) -> None:
    """Where the fusion is an optional one: of that provider alone, and not of one kernel."""
    fused, part = kernel("mha_prefill_quantize"), kernel("mha_prefill")
    others = kernel("mha_prefill_quantize", "better", 40), kernel("mha_prefill", "better", 40)
    quantised = [
        replace(s, op="mha_prefill_quantize", module=f"{s.module}.o")
        for s in sites
        if s.op == "mha_prefill"
    ]
    for pins, expected in (
        ((), "better.mha_prefill_quantize"),
        (("mha_prefill=mine",), "mine.mha_prefill_quantize"),
        (("mha_prefill=mine.mha_prefill",), "composed"),
        (("mha_prefill=reference",), "composed"),
    ):
        found = bind([*sites, *quantised], fused, part, *others, pins=pins)
        assert chosen(found, "mha_prefill_quantize") == {expected}


def test_a_pin_never_beats_a_refusal(sites) -> None:
    no = kernel("linear", refuse=lambda facts: "needs a fan" if facts.module == "lm_head" else None)
    with pytest.raises(ConfigError, match=r"--pin linear=mine.*refused at lm_head: .*needs a fan"):
        bind(sites, no, pins=("linear=mine.linear",))
    found = bind(sites, no, pins=("linear@layers.*=mine.linear",))
    assert chosen(found, "linear") == {"mine.linear", "reference.ReferenceLinear"}


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("linear", "write OP"),
        ("liner=x", "op 'liner' is unknown; did you mean 'linear'"),
        ("nothing=triton", "op 'nothing' is unknown; `ds-runtime ops` lists them"),
        ("linear=", "write OP"),
        ("=reference", "write OP"),
        ("linear@=reference", "write OP"),
        ("linear=reference.ReferenceLinaer", "did you mean 'reference.ReferenceLinear'"),
        ("linear=nobody.linear", "no such kernel; offered: reference.ReferenceLinear"),
        (
            "linear@*.w_proj=reference",
            r"--pin linear@\*.w_proj=reference: matches no site: linear has others, like layers",
        ),
        ("sparse_decode=reference", "--pin sparse_decode=reference: matches no site: this model"),
    ],
)
def test_a_wrong_pin_says_what_is_wrong(sites, pin: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bind(sites, pins=(pin,))


# layouts


def in_other(op: str, rank: int = 20) -> Kernel:
    return kernel(op, "other", rank, layouts=frozenset({OTHER.tag}))


CACHE_OPS = ("mla_decode", "cache_write", "cache_gather")


def test_the_best_decode_kernel_chooses_the_layout_and_all_cache_ops_follow(sites) -> None:
    found = bind(sites, *(in_other(op) for op in CACHE_OPS), layouts=(OTHER,))
    assert found.layout == OTHER
    for op in CACHE_OPS:
        assert chosen(found, op) == {f"other.{op}"}
        assert f"does not use cache layout {OTHER.tag}" in str(decisions(found, op)[0].refused)


@pytest.mark.parametrize("missing", ["cache_write", "cache_gather"])
def test_a_layout_that_not_every_cache_op_serves_is_not_chosen(sites, missing: str) -> None:
    """cache_write is needed only as a part of the composed mla_prologue, and counts as well."""
    some = [in_other(op) for op in CACHE_OPS if op != missing]
    found = bind(sites, *some, layouts=(OTHER,))
    assert found.layout.tag == LATENT_PAGES.tag
    assert chosen(found, "mla_decode") == {"reference.ReferenceMlaDecode"}


def test_a_fused_prologue_makes_up_for_the_missing_cache_write(sites) -> None:
    some = [in_other(op) for op in ("mla_decode", "cache_gather", "mla_prologue")]
    assert bind(sites, *some, layouts=(OTHER,)).layout == OTHER


def test_page_sizes_of_a_layout(sites) -> None:
    layout = replace(OTHER, page_sizes=(64,))
    offered = [in_other(op) for op in CACHE_OPS]
    assert bind(sites, *offered, layouts=(layout,)).layout.tag == LATENT_PAGES.tag
    with_64 = replace(BASE, page_size=64)
    assert bind(sites, *offered, layouts=(layout,), base=with_64).layout == layout


def test_a_pin_decides_the_layout(sites) -> None:
    offered = [in_other(op) for op in CACHE_OPS]
    found = bind(sites, *offered, layouts=(OTHER,), pins=("cache_gather=reference",))
    assert found.layout.tag == LATENT_PAGES.tag


def test_no_layout_says_why(sites) -> None:
    with pytest.raises(UnsupportedError, match=r"no KV cache layout fits: .*reference"):
        bind(sites, base=replace(BASE, kv_dtype="int3"))


# fusions


def test_a_fused_kernel_binds_and_its_parts_are_not_needed(sites) -> None:
    found = bind(sites, kernel("mla_prologue"))
    assert chosen(found, "mla_prologue") == {"mine.mla_prologue"}
    assert not decisions(found, "cache_write") and not decisions(found, "rope")


def test_a_pin_on_a_part_takes_its_fusion_apart(sites) -> None:
    fused = kernel("mla_prologue")
    assert chosen(bind(sites, fused), "mla_prologue") == {"mine.mla_prologue"}
    apart = bind(sites, fused, pins=("rope=reference",))
    (decision, *_) = decisions(apart, "mla_prologue")
    assert decision.kernel == "composed" and "(a part of it is pinned)" in decision.note
    assert chosen(apart, "rope") == {"reference.rope"}


def test_so_does_a_pin_on_a_part_of_a_part(tmp_path) -> None:
    """Norms are within the fusion that adds, and that within the one that quantises as well."""
    folder = tiny_config(tmp_path)
    sites = model_sites(load_config(folder), lambda module: "fp8_block")
    op = "add_rms_norm_quantize"
    sites.append(Site(op, 1, "block"))
    offered = kernel(op), kernel("add_rms_norm"), kernel("rms_norm")
    assert f"mine.{op}" in chosen(bind(sites, *offered), op)
    pinned = bind(sites, *offered, pins=("rms_norm=reference",))
    assert chosen(pinned, op) == chosen(pinned, "add_rms_norm") == {"composed"}
    assert decisions(pinned, op)[0].note == "left to add_rms_norm (a part of it is pinned)"
    assert chosen(pinned, "rms_norm") == {"reference.rms_norm"}
    elsewhere = bind(sites, *offered, pins=("rms_norm@*self_attn=reference",))
    assert f"mine.{op}" in chosen(elsewhere, op)
    offers = Offers((*REFERENCE.kernels, *offered), REFERENCE.layouts, (), frozenset())
    disabled = decide_all(sites, offers, BASE, [], frozenset({"add_rms_norm"}))
    assert chosen(disabled, op) == {"composed"}
    assert decisions(disabled, op)[0].note == "left to add_rms_norm (--fusion add_rms_norm=off)"


def test_an_optional_fusion_has_a_place_where_a_plugin_offers_it(sites) -> None:
    """Elsewhere the model calls its parts: nothing is loaded, nothing is held twice."""
    alone = bind(sites)
    (decision, *_) = decisions(alone, "mla_inputs")
    assert decision.note == "left to linear, rms_norm, mla_absorb, mla_prologue"
    layers = [s.layer for s in sites if s.op == "mla_inputs"]
    assert layers and not any(BoundOps(alone).has("mla_inputs", n, INPUTS) for n in layers)
    offered = kernel("mla_inputs", formats=frozenset({"dense"}))
    assert chosen(bind(sites, offered), "mla_inputs") == {"mine.mla_inputs"}
    narrow = kernel("mla_inputs", formats=frozenset({"int8_channel"}))
    assert chosen(bind(sites, narrow), "mla_inputs") == {"composed"}, "no weight is converted"


def test_an_optional_fusion_gives_way_to_a_part_made_for_the_device(tmp_path) -> None:
    """A vendor's silu_mul is not swallowed by a portable kernel that also quantises."""
    folder = tiny_config(tmp_path)
    sites = model_sites(load_config(folder), lambda module: "fp8_block")
    sites.append(Site("silu_mul_quantize", 0, "mlp"))
    fused = kernel("silu_mul_quantize", "portable", 10)
    assert "portable.silu_mul_quantize" in chosen(bind(sites, fused), "silu_mul_quantize")
    found = bind(sites, fused, kernel("silu_mul", "acme", 30))
    assert chosen(found, "silu_mul_quantize") == {"composed"}
    assert "acme.silu_mul outranks" in decisions(found, "silu_mul_quantize")[0].note


def test_a_refused_fusion_is_composed_of_the_best_parts(sites) -> None:
    fused = kernel("mla_prologue", refuse=lambda facts: "heads must be even")
    found = bind(sites, fused, kernel("rope", "quick"))
    decision = decisions(found, "mla_prologue")[0]
    assert decision.kernel == "composed"
    assert dict(decision.refused) == {"mine.mla_prologue": "heads must be even"}
    assert chosen(found, "rope") == {"quick.rope"}


def test_bound_compositions_call_the_bound_parts(sites) -> None:
    import torch

    ops = BoundOps(bind(sites)).at(0, "block")
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    normed, summed = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    expected = torch.nn.functional.rms_norm(x + residual, (64,), weight, 1e-6)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(summed, x + residual)
    with pytest.raises(RuntimeError, match="'route' is not bound at site 'layer 0 block'"):
        ops.route()


class _Marked:
    """A Linear that says who computed, with the weight of whoever packed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pack(self, weight: object, facts: Facts) -> Packed:
        return Packed(str(weight), (4, 4), {"by": self.name}, 0)

    def apply(self, x: list[int], packed: Packed) -> str:
        return f"{self.name} of {packed.tensors['by']}"


def marked_few(facts: Facts) -> _Marked:
    return _Marked("few")


def marked_many(facts: Facts) -> _Marked:
    return _Marked("many")


def marked_middle(facts: Facts) -> _Marked:
    return _Marked("middle")


def _pair(few_rank: int, many_rank: int, packing: str = "rows.v9") -> list[Kernel]:
    few = kernel("linear", "few", few_rank, rows=RowRange("rows.v9"))
    many = kernel("linear", "many", many_rank, rows=RowRange(packing, 3))
    fn = f"{__name__}:marked_"
    return [replace(few, fn=fn + "few"), replace(many, fn=fn + "many")]


@pytest.mark.parametrize("ranks", [(20, 30), (30, 20)])
def test_two_kernels_of_one_packing_share_a_place(sites, ranks: tuple[int, int]) -> None:
    import torch

    binding = bind(sites, *_pair(*ranks))
    said = {"few.marked_few": "many.marked_many from 3 rows on"}
    said |= {"many.marked_many": "few.marked_few below 3 rows"}
    rows = [d for d in binding.decisions if d.op == "linear"]
    assert {d.note for d in rows} == {said[rows[0].kernel]}
    linear = BoundOps(binding).at(0, "self_attn.o_proj").linear
    for packing, two, three in (("rows.v9", "few", "many"), ("its own", "few", "few")):
        packed = linear.pack(packing, BASE)
        assert linear.apply(torch.zeros(2, 4), packed) == f"{two} of few"
        assert linear.apply(torch.zeros(3, 4), packed) == f"{three} of few"


def for_another_torch(facts: Facts) -> _Marked:
    raise ImportError("_C.so: undefined symbol")


def test_a_kernel_whose_library_does_not_load_is_named(sites) -> None:
    broken = replace(kernel("linear", "acme", 30), fn=f"{__name__}:for_another_torch")
    said = (
        r"kernel acme\.for_another_torch .* cannot be loaded: ImportError: _C\.so: undefined symbol"
    )
    with pytest.raises(PluginError, match=said + "; --pin linear=KERNEL selects another"):
        BoundOps(bind(sites, broken))


class _Absorb:
    """Says which kernel it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pack(self, weight: object, facts: Facts) -> object:
        raise AssertionError

    def expand(self, latent: object, packed: object) -> tuple[str, str]:
        return self.name, "values"

    def apply_q(self, q_nope: object, q_rope: object, packed: object) -> str:
        return self.name

    apply_v = apply_q


def test_bounds_may_hold_for_one_method_alone() -> None:
    import torch

    from ds_runtime.ops.binding.bound import ByRows
    from ds_runtime.ops.weight import Packed

    few = kernel("mla_absorb", "few", 30, rows=RowRange("rows.v9"))
    many = kernel("mla_absorb", "many", 10, rows=RowRange("rows.v9", 3))
    for by_rows, said, name in (
        (frozenset(), "many.mla_absorb from 3 rows on", "many"),
        (frozenset({"expand"}), "many.mla_absorb expand from 3 rows on", "few"),
    ):
        shares = shares_of([few, replace(many, rows=replace(many.rows, methods=by_rows))])
        assert shares is not None and shares.beside(few) == said
        both = ByRows(shares, [_Absorb("few"), _Absorb("many")])
        packed, two, three = Packed("rows.v9", (), {}, 0), torch.zeros(2, 1), torch.zeros(3, 1)
        assert both.expand(two, packed) == ("few", "values")
        assert both.expand(three, packed) == ("many", "values")
        assert both.apply_q(three, three, packed) == name == both.apply_q(three, None, packed)
        assert both.apply_q(two, two, packed) == "few"


def _served(binding: Binding, *rows: int) -> list[str]:
    """What serves a Linear's calls of so many rows."""
    import torch

    linear = BoundOps(binding).at(0, "self_attn.o_proj").linear
    packed = linear.pack("rows.v9", BASE)
    return [linear.apply(torch.zeros(count, 4), packed) for count in rows]


def test_three_kernels_of_one_packing_share_a_place(sites) -> None:
    """One for a middle range, one from a number of rows on, and one for the rest, which packs."""
    few, many = _pair(20, 30)
    middle = replace(many, fn=f"{__name__}:marked_middle", rank=10, rows=asking(2, 4))
    binding = bind(sites, few, many, middle)
    assert {d.note for d in binding.decisions if d.op == "linear"} == {
        "many.marked_middle of 2 rows; few.marked_few below 2 rows"
    }
    assert _served(binding, 1, 2, 3, 5) == [
        "few of few",
        "middle of few",
        "many of few",
        "many of few",
    ]


def test_where_all_kernels_ask_the_best_packs_and_serves_the_rest(sites) -> None:
    _, many = _pair(20, 30)
    middle = replace(many, fn=f"{__name__}:marked_middle", rank=10, rows=asking(0, 6))
    few = replace(many, fn=f"{__name__}:marked_few", rank=20, rows=asking(2, 5))
    binding = bind(sites, many, middle, few)
    assert {d.note for d in binding.decisions if d.op == "linear"} == {
        "many.marked_few of 2 rows; many.marked_middle below 2 rows"
    }
    shares = next(s for (op, *_), s in binding.shares.items() if op == "linear")
    assert shares.calls_of(many) == "from 3 rows on"
    from_four = replace(many, rows=asking(4))
    others = shares_of([from_four, middle, few])
    assert others is not None and others.calls_of(from_four) == "from 4 rows on"
    bounded = replace(many, rows=asking(4, 8))
    others = shares_of([bounded, replace(few, rows=asking(10))])
    assert others is not None and others.calls_of(bounded) == "below 10 rows"
    assert _served(binding, 1, 2, 3, 9) == [
        "middle of many",
        "few of many",
        "many of many",
        "many of many",
    ]
    assert not bind(sites, many).shares


class _Beside(_Marked):
    """Reads a form of its own."""

    def hold_second_form(self, packed: Packed) -> Packed:
        return replace(packed, tensors={"by": packed.tensors["by"] + " and " + self.name})

    def serves(self, rows: int, packed: Packed) -> bool:
        return rows < 5


class _Without(_Beside):
    def hold_second_form(self, packed: Packed) -> Packed:
        return packed

    def serves(self, rows: int, packed: Packed) -> bool:
        return False


def marked_without(facts: Facts) -> _Without:
    return _Without("without")


def marked_beside(facts: Facts) -> _Beside:
    return _Beside("beside")


def test_a_kernel_may_hold_a_form_of_its_own_beside(sites) -> None:
    import torch

    few, many = _pair(20, 10)
    many = replace(many, fn=f"{__name__}:marked_beside", footprint=BESIDE)
    binding = bind(sites, few, many)
    said = [f"{name} of few and beside" for name in ("few", "beside", "few")]
    assert _served(binding, 2, 3, 5) == said
    linear = BoundOps(binding).at(0, "self_attn.o_proj").linear
    packed = linear.pack("its own", BASE)  # which is no shared packing
    assert linear.apply(torch.zeros(3, 4), packed) == "few of few"
    site = next(s for s, _ in binding.choices if s.op == "linear")
    assert second_form_of(binding, site, few) == 0.75


def test_without_room_nothing_is_held_beside(sites) -> None:
    few, many = _pair(20, 10)
    many = replace(many, fn=f"{__name__}:marked_beside", footprint=BESIDE)
    facts = replace(BASE, crowded=frozenset({"linear"}))
    said = "holds an extra 75% of the weight, for which memory has no room"
    assert refusal(many, facts) == said and refusal(few, facts) is None
    for other in (BASE, replace(BASE, crowded=frozenset({"experts"}))):
        assert refusal(many, other) is None


def test_one_that_packs_holds_its_form_then(sites) -> None:
    few, many = (
        replace(k, fn=f"{__name__}:marked_beside", footprint=BESIDE, rows=asking(1))
        for k in _pair(20, 10)
    )
    linear = BoundOps(bind(sites, few, many)).at(0, "self_attn.o_proj").linear
    packed = linear.pack("rows.v9", BASE)
    assert packed.tensors["by"] == "beside and beside"  # of the other alone


def test_a_weight_without_the_form_is_said_once(sites, caplog) -> None:
    _say_plain.cache_clear()
    few, many = _pair(20, 10)
    many = replace(many, fn=f"{__name__}:marked_without", footprint=BESIDE)
    for _ in range(2):
        assert _served(bind(sites, few, many), 2, 3) == ["few of few"] * 2
    said = [r.message for r in caplog.records]
    assert said == ["many.marked_without has no form for a weight of 4 × 4: others serve its calls"]


def test_another_packing_or_a_pin_leaves_one_kernel(sites) -> None:
    assert not bind(sites, *_pair(20, 30, packing="cols.v9")).shares
    binding = bind(sites, *_pair(20, 30), pins=("linear=many",))
    assert not binding.shares and chosen(binding, "linear") == {"many.marked_many"}


def test_a_kernel_that_cannot_be_imported_is_named(sites) -> None:
    with pytest.raises(PluginError, match=r"kernel mine.route .*ModuleNotFoundError.*--pin route="):
        BoundOps(bind(sites, kernel("route")))


# plans


def plan_of(binding: Binding, **more: object) -> Plan:
    values = {
        "model": "m",
        "platform": "cpu",
        "arch": "any",
        "dtype": "float32",
        "kv_layout": binding.layout.tag,
        "kv_dtype": "float32",
        "index_dtype": "",
        "page_size": 16,
        "tp": 1,
        "attn_dp": 1,
        "rows": make_rows(binding.decisions),
        "changes": (),
        "versions": (),
    }
    return Plan(**{**values, **more})  # type: ignore[arg-type]


@settings(deadline=None)  # the first one imports
@given(seed=st.integers(0, 2**32))
def test_a_plan_does_not_depend_on_the_order_of_loading(sites, seed: int) -> None:
    draw = random.Random(seed)
    offered = [
        *REFERENCE.kernels,
        *(kernel(op, p, r) for op in ("linear", "rope") for p, r in (("a", 20), ("b", 20))),
    ]
    expected = plan_of(decide_all(sites, replace(REFERENCE, kernels=tuple(offered)), BASE))
    draw.shuffle(offered)
    found = plan_of(decide_all(sites, replace(REFERENCE, kernels=tuple(offered)), BASE))
    assert found.digest() == expected.digest()


def test_digest_and_difference_see_another_kernel(sites) -> None:
    one, two = plan_of(bind(sites)), plan_of(bind(sites, kernel("route")))
    assert one.digest() != two.digest()
    said = difference(one.to_dict(), two.to_dict())
    assert said == [
        "route at layers.1-2.mlp: reference.route here, mine.route there",
    ]
    assert difference(one.to_dict(), one.to_dict()) == []
    other = plan_of(bind(sites), kv_dtype="float8_e4m3fn", index_dtype="float8_e4m3fn")
    assert difference(plan_of(bind(sites)).to_dict(), other.to_dict()) == [
        "--kv-cache-dtype: 'float32' here, 'float8_e4m3fn' there",
        "--index-cache-dtype: '' here, 'float8_e4m3fn' there",
    ]
    assert difference(one.to_dict(), plan_of(bind(sites), tp=2).to_dict()) == [
        "--tp: 1 here, 2 there"
    ]


def test_a_plan_of_before_sum_sizes_differs_by_its_sentence_alone(sites) -> None:
    now = plan_of(bind(sites)).to_dict() | {"sums": "by sizes", "sum_sizes": "one_shot up to 1"}
    before = {key: value for key, value in now.items() if key != "sum_sizes"}
    assert difference(now, before) == difference(before, now) == []
    assert difference(now, before | {"sums": "others"}) == ["sums: 'by sizes' here, 'others' there"]
    assert difference(now, now | {"sums": "why", "sum_sizes": ""}) == [
        "sums: 'by sizes' here, 'why' there"
    ]
    assert difference(now, now | {"sums": "the same sizes, found elsewhere"}) == []


def test_heavy_references_are_found(sites) -> None:
    found = plan_of(bind(sites, kernel("linear")))
    assert {row.op for row in found.heavy_references()} == {
        "experts",
        "mha_prefill",
        "mla_absorb",
        "mla_decode",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is no plan"),
        ('{"rows": [{}]}', "is no plan"),
        ('{"rows": [], "format": 0}', "format 0, this runtime reads 1"),
    ],
)
def test_a_plan_file_that_is_none(sites, tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        check_against(plan_of(bind(sites)), str(path))


def test_a_locked_plan_accepts_itself_and_names_what_differs(sites, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(bind(sites)).to_dict()))
    check_against(plan_of(bind(sites)), str(path))
    with pytest.raises(ConfigError, match=r"route at layers.1-2.mlp: mine.route here"):
        check_against(plan_of(bind(sites, kernel("route"))), str(path))


def test_a_place_has_one_kernel_per_op_whatever_the_phase(sites) -> None:
    again = replace(next(s for s in sites if s.op == "mha_prefill"), phase="decode")
    with pytest.raises(AssertionError, match=r"two sites of mha_prefill at layers\.0\."):
        bind([*sites, again])
    # A fusion's part that the place has already serves the fusion, and is not decided again.
    fused = [s for s in sites if s.op == "mla_prologue"]
    later = [replace(s, phase="prefill") for s in fused]
    binding = bind([*(s for s in sites if s not in fused), *later])
    places = [(s.op, s.layer, s.module) for s, _ in binding.choices]
    assert len(places) == len(set(places))
    narrow = [replace(s, phase="decode") if s.op == "rms_norm" else s for s in sites]
    with pytest.raises(AssertionError, match="is to serve"):
        bind(narrow)
