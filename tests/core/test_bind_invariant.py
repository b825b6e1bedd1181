"""What `--batch-invariant` binds, refuses, and says that it gave up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_bind import BASE, asking, bind, chosen, kernel, sites  # noqa: F401

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.plan import render
from ds_runtime.cli.known import KNOWN
from ds_runtime.config import EngineConfig
from ds_runtime.description.sites import DRAFT
from ds_runtime.errors import ConfigError, UnsupportedError
from ds_runtime.ops.binding.bind import decide_all, refusals
from ds_runtime.ops.contract import Gates, Offers, Site
from ds_runtime.ops.kernel import Layout, Promises
from ds_runtime.parallel.mesh import Mesh
from ds_runtime.parallel.sums.in_order import InOrder
from ds_runtime.parallel.sums.kinds import Sums
from ds_runtime.parallel.sums.sizes import MANY
from ds_runtime.parallel.world import World

V3 = Path(__file__).parents[1] / "launch_lines" / "configs"
OWN = Promises(batch_invariant=True)
INVARIANT = replace(BASE, batch_invariant=True)
PROMPTS = {"mha_prefill", "merge_state", "cache_gather", "sparse_prefill", "mha_prefill_quantize"}


def own(op, provider="own", rank=10, **more):
    return kernel(op, provider, rank, **{"promises": OWN, **more})


def tagged(kernel, bits):
    return replace(kernel, rows=replace(kernel.rows, bits=bits))


def test_a_kernel_without_the_tag_is_refused_in_words_that_name_the_flag():
    said = [*refusals(kernel("rms_norm"), INVARIANT)]
    assert said == [
        "a row's bits may hang on other rows: not batch-invariant: leave --batch-invariant out"
    ]
    assert not [*refusals(kernel("rms_norm"), BASE)]
    assert not [*refusals(own("rms_norm"), INVARIANT)]
    assert [
        *refusals(own("rms_norm", promises=replace(OWN, deterministic=False)), INVARIANT)
    ] == said


def test_drafts_may_take_any_kernel():
    assert not [*refusals(kernel("rms_norm"), replace(INVARIANT, role=DRAFT))]


def test_the_next_with_the_tag_serves_and_the_plan_says_in_place_of_what(sites):  # noqa: F811
    norms = [site for site in sites if site.op == "rms_norm"]
    refusing = kernel("rms_norm", "never", 40, refuse=Gates((lambda facts: "no",)))
    binding = bind(norms, refusing, kernel("rms_norm", "fast"), own("rms_norm"), base=INVARIANT)
    assert chosen(binding, "rms_norm") == {"own.rms_norm"}
    assert {d.instead for d in binding.decisions} == {("fast.rms_norm",)}
    assert {d.instead for d in bind(norms, kernel("rms_norm", "fast")).decisions} == {()}


def test_where_none_is_left_the_error_names_the_op_and_what_to_do(sites):  # noqa: F811
    norms = [site for site in sites if site.op == "rms_norm"]
    do = "install or build what one of them lacks, or leave --batch-invariant out"
    at = r"no kernel for rms_norm at layers\.\d\.block: "
    with pytest.raises(
        UnsupportedError, match=f"{at}no kernel of rms_norm is batch-invariant; {do}"
    ):
        bind(norms, kernel("rms_norm", "fast"), base=INVARIANT)
    lacking = own("rms_norm", refuse=lambda facts: "acme is not installed: pip install acme")
    said = r"own\.rms_norm: acme is not installed: pip install acme; "
    with pytest.raises(UnsupportedError, match=at + said + do):
        bind(norms, kernel("rms_norm", "fast"), lacking, base=INVARIANT)


def test_where_no_layout_is_left_the_error_names_what_is_to_be_built():
    config = EngineConfig(model="demo", batch_invariant=True)
    fits = "^no KV cache layout fits: "
    with pytest.raises(
        UnsupportedError, match=rf"{fits}cpu\.mla_decode_native: native library not"
    ):
        assemble(config, device="epyc-9755", without=("native",))
    said = (
        "no kernel of mha_decode is batch-invariant; leave --disable-mla or --batch-invariant out$"
    )
    with pytest.raises(UnsupportedError, match=said):
        assemble(replace(config, platform="cpu", disable_mla=True))


def test_where_no_kernel_of_adapters_is_left_the_error_names_their_flags():
    site = Site("lora_delta", 0, "o_proj", shape=(32, 16))
    flags = "leave --lora and --max-loras or --batch-invariant out$"
    with pytest.raises(UnsupportedError, match=f"no kernel of lora_delta is .*; {flags}"):
        bind([site], kernel("lora_delta", "fast"), base=INVARIANT)


@pytest.mark.parametrize("graphs", [False, True])
def test_adapters_have_kernels_on_cpus(graphs):
    config = EngineConfig(
        model="demo", platform="cpu", batch_invariant=True, max_loras=2, disable_graph=not graphs
    )
    made = {d.kernel for d in assemble(config).binding.decisions if d.op == "lora_delta"}
    assert made == {f"cpu.lora_delta_ordered{'_masked' if graphs else ''}"}


def test_a_layout_is_not_chosen_for_a_kernel_that_may_not_serve_alone(sites):  # noqa: F811
    """One for some sizes alone, ranked best, with a layout of its own."""
    few = own("mla_decode", "few", 30, rows=asking(0, 5, "x"), layouts={"few.v1"})
    whole = own("mla_decode", "whole", 20, layouts={"whole.v1"})
    readers = [site for site in sites if site.op == "mla_decode"][:1]
    offered = Offers(
        (few, whole),
        tuple(Layout(t, 1, "nowhere:allocate", lambda facts: 1) for t in ("few", "whole")),
        (),
        frozenset(),
    )
    assert decide_all(readers, offered, INVARIANT).layout.tag == "whole.v1"
    with pytest.raises(
        UnsupportedError, match=r"few\.mla_decode: serves calls of some sizes alone"
    ):
        decide_all(readers, replace(offered, kernels=(few,)), INVARIANT)


def test_shares_by_rows_need_the_same_bits(sites):  # noqa: F811
    linears = [site for site in sites if site.op == "linear"][:1]
    few = own("linear", "few", 30, rows=asking(0, 5))
    many = own("linear", "many", 20, rows=asking(0))
    alone = bind(linears, few, many, base=INVARIANT)
    assert chosen(alone, "linear") == {"many.linear"} and not alone.shares
    (said,) = refusals(few, replace(INVARIANT, weight_format="dense"))
    assert said.startswith("serves calls of some sizes alone, whose bits no other kernel shares")
    same = [tagged(k, "rows in order") for k in (few, many)]
    assert chosen(both := bind(linears, *same, base=INVARIANT), "linear") == {"few.linear"}
    assert [k.name for s in both.shares.values() for k in s.kernels] == [
        "many.linear",
        "few.linear",
    ]
    others = tagged(few, "another order"), same[1]
    assert not bind(linears, *others, base=INVARIANT).shares
    assert bind(linears, few, many).shares  # without the flag they may


def test_a_kernel_for_some_sizes_serves_no_others(sites):  # noqa: F811
    """Not even alone, best or pinned: what it promises of a row's bits holds where it is asked."""
    linears = [site for site in sites if site.op == "linear"][:1]
    few = own("linear", "few", 30, rows=asking(0, 5, "in order"))
    more = own("linear", "more", 25, rows=asking(5, bits="in order"))
    many = own("linear", "many", 20, rows=asking(0, bits="in order"))
    others = [
        tagged(many, "another order"),
        tagged(many, ""),
        replace(many, rows=replace(many.rows, packing="other.v1")),
        replace(many, promises=Promises()),
    ]
    for other in others:
        made = () if other.promises.batch_invariant else (own("linear", "plain", 5),)
        serving = "many.linear" if other.promises.batch_invariant else "plain.linear"
        alone = bind(linears, few, more, other, *made, base=INVARIANT)
        assert chosen(alone, "linear") == {serving} and not alone.shares
        (decision,) = alone.decisions
        assert {name for name, why in decision.refused if "of some sizes" in why} == {
            "few.linear",
            "more.linear",
        }
    plain = bind(linears, few, others[3])
    assert chosen(plain, "linear") == {"few.linear"} and plain.shares  # without the flag it may
    with pytest.raises(ConfigError, match=r"few\.linear: serves calls of some sizes alone"):
        bind(linears, few, many, base=INVARIANT, pins=("linear=few.linear",))
    with pytest.raises(UnsupportedError, match="serves calls of some sizes alone"):
        offers = Offers((few, more), (), (), frozenset())
        decide_all(linears, offers, INVARIANT)


def test_prompts_have_no_sites_of_their_own(tmp_path):
    for settings in ({}, {"speculative_algorithm": "NEXTN"}):
        made = assemble(
            EngineConfig(model="demo", platform="cpu", batch_invariant=True, **settings)
        )
        bound = {site.op for site, _ in made.binding.choices}
        assert not bound & PROMPTS
        assert {s.phase for s, _ in made.binding.choices if s.op == "mla_decode"} == {"decode"}


def test_the_plan_says_what_was_given_up_in_text_and_as_data():
    made = assemble(EngineConfig(model="demo", platform="cpu", batch_invariant=True, tp=2))
    assert made.plan.given_up[:2] == (
        "prompts attend cached latents row by row, as decode steps do, not in tiles of queries",
        "sums gather the parts of 2 ranks, and each adds them in order",
    )
    data = json.loads(json.dumps(made.plan.to_dict(), default=list))
    assert data["given_up"] == [*made.plan.given_up]
    for said in made.plan.given_up:
        assert f"gives up for --batch-invariant: {said}" in render(made.plan)
    plain = assemble(EngineConfig(model="demo", platform="cpu")).plan
    assert "given_up" not in plain.to_dict() and "gives up" not in render(plain)


def test_trees_of_drafts_are_refused():
    tree = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2}
    with pytest.raises(ConfigError, match=r"--speculative-eagle-topk 2 with --batch-invariant: "):
        EngineConfig(batch_invariant=True, speculative_eagle_topk=2, **tree)
    EngineConfig(batch_invariant=True, speculative_eagle_topk=1, **tree)


def test_the_flag_of_other_engines_is_known():
    assert KNOWN["--enable-deterministic-inference"] == "batch_invariant"


class Group:
    """Of three ranks that have these parts."""

    rank, size = 1, 3

    def __init__(self, parts):
        self.parts = parts

    def gather_rows(self, x):
        if x.dim() == 1:  # of sums that each rank has made of its share
            sums = [Share(self.parts, rank).sum() for rank in range(3)]
            assert torch.equal(sums[self.rank], x)
            return torch.cat(sums)
        return torch.cat([p.reshape(1, -1) for p in self.parts])

    def all_to_all(self, x):
        return torch.cat([p.chunk(3)[self.rank] for p in self.parts])


def test_every_group_of_several_ranks_adds_up_so():
    for in_order in (False, True):
        world = World(Mesh(3), Group([]), in_order)
        assert isinstance(world.group("tp"), InOrder if in_order else Group)
        assert not isinstance(world.group("attn_dp"), InOrder)
        assert not isinstance(world.everyone, InOrder)  # of objects, and splits


class AtOnce(Group):
    """Has a kernel for few values."""

    def ordered_sum(self, values):
        self.asked = [*getattr(self, "asked", ()), values]
        return lambda x: self.added(x.numel())

    def added(self, count):
        self.calls = [*getattr(self, "calls", ()), count]
        total = self.parts[0].reshape(-1).float()
        for part in self.parts[1:]:
            total = total + part.reshape(-1).float()
        return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_values_are_summed_at_once_with_the_same_bits(dtype, monkeypatch):
    torch.manual_seed(5)
    parts = [(torch.randn(5, 6) * 10.0 ** (4 * i - 4)).to(dtype) for i in range(3)]
    group = AtOnce(parts)
    own, apart = InOrder(group), InOrder(AtOnce(parts), here=False)
    assert group.asked == [MANY]
    found, gathered = own.all_reduce(parts[1]), apart.all_reduce(parts[1])
    assert torch.equal(found, gathered) and found.dtype == dtype and group.calls == [30]
    assert not hasattr(apart._group, "asked"), "ranks of several hosts share no memory"
    assert not InOrder(Group(parts))._at_once, "written before the contract had it"
    padded = [torch.nn.functional.pad(p.reshape(-1), (0, -p.numel() % 3)) for p in parts]
    group.all_to_all = lambda x: torch.cat([p.chunk(3)[1] for p in padded])
    monkeypatch.setattr("ds_runtime.parallel.sums.in_order.MANY", 30)
    assert torch.equal(own.all_reduce(parts[1]), found) and group.calls == [30]


def test_values_that_no_float32_holds_are_gathered():
    parts = [torch.tensor([1.0, 2.0**-40], dtype=torch.float64)] * 3
    assert torch.equal(InOrder(AtOnce(parts)).all_reduce(parts[1]), 3 * parts[0])
    empty = [torch.empty(0, 4)] * 3
    assert InOrder(AtOnce(empty)).all_reduce(empty[1]).shape == (0, 4)


def test_each_group_is_asked_once_for_its_sum():
    group = AtOnce([])
    World(Mesh(3), group, True)  # of which several axes have the ranks
    assert group.asked == [MANY]
    assert World(Mesh(3), AtOnce([]), True).sums == Sums(at_once=True)
    assert World(Mesh(3), Group([]), True).sums == Sums()
    assert World(Mesh(3, attn_dp=3), AtOnce([]), True).sums == Sums(), "nobody divides heads"
    World(Mesh(3, hosts=3), there := AtOnce([]), True)
    assert not hasattr(there, "asked")
    off = World(Mesh(3), there, True, shares=False)
    assert not hasattr(there, "asked") and off.sums == Sums(), "--disable-custom-all-reduce"


@pytest.mark.parametrize(
    ("device", "tp", "flags", "at_once"),
    [
        ("h200", 2, {}, True),
        ("h200", 8, {}, True),
        ("h200", 8, {"dp": 2, "enable_dp_attention": True}, True),
        ("h200", 8, {"dp": 8, "enable_dp_attention": True}, False),
        ("h200", 16, {}, False),
        ("h200", 2, {"disable_custom_all_reduce": True}, False),
        ("h200", 4, {"nnodes": 2, "dist_init_addr": "h:1"}, False),
        ("l40s", 2, {}, False),
    ],
)
def test_the_plan_says_which_sums_are_one_kernel(tmp_path, device, tp, flags, at_once):
    config = V3 / "deepseek-v3-0324.json"
    (tmp_path / "config.json").write_text(config.read_text())
    given = {"tp": tp, "batch_invariant": True, **flags}
    made = assemble(EngineConfig(model=str(tmp_path), **given), given, device=device)
    assert made.sums.at_once == at_once
    said = "sums of fewer than 262144 values are one kernel, which adds ranks in order"
    assert (said in made.plan.given_up) == at_once
    assert Crossing.of(made).at_once == at_once
    assert made.summing(Sums(at_once=at_once, gathered=made.sums.gathered)) is made
    lost = made.summing(Sums())
    assert not Crossing.of(lost).at_once and said not in lost.plan.given_up
    assert ("could not set it up" in lost.plan.sums) == at_once


class Share(Group):
    def __init__(self, parts, rank):
        self.parts, self.rank = parts, rank

    def sum(self):
        padded = [torch.nn.functional.pad(p.reshape(-1), (0, -p.numel() % 3)) for p in self.parts]
        own = [p.chunk(3)[self.rank].float() for p in padded]
        return ((own[0] + own[1]) + own[2]).to(self.parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_values_have_the_same_sums(dtype, monkeypatch):
    """Each rank adds a share of them, in the same order."""
    torch.manual_seed(3)
    parts = [torch.randn(5, 7, dtype=torch.float32).to(dtype) for _ in range(3)]
    few = InOrder(Group(parts)).all_reduce(parts[1])
    monkeypatch.setattr("ds_runtime.parallel.sums.in_order.MANY", 1)
    padded = [torch.nn.functional.pad(p.reshape(-1), (0, 1)) for p in parts]
    group = Group(parts)
    group.all_to_all = lambda x: torch.cat([p.chunk(3)[1] for p in padded])
    assert torch.equal(InOrder(group).all_reduce(parts[1]), few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_add_up_in_their_order(dtype):
    parts = [torch.tensor([1.0, 1e8, -1e8, 3.0, 5.0, 7.0]) * s for s in (1.0, -0.5, 1e-7)]
    parts = [p.to(dtype) for p in parts]
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    group = InOrder(Group(parts))
    assert torch.equal(group.all_reduce(parts[1]), expected)
    assert torch.equal(group.all_reduce(parts[1].view(2, 3)), expected.view(2, 3))
    rows = [p.view(3, 2) for p in parts]
    assert torch.equal(InOrder(Group(rows)).reduce_scatter(rows[1]), expected.view(3, 2)[1:2])


class Older:
    """Of three ranks, as written before `all_to_all` was in the contract."""

    rank, size = 1, 3

    def __init__(self, parts):
        self.parts, self.first = parts, True

    def gather_rows(self, x):
        if x.dim() == 1:  # of sums that each rank has made of its share
            sums = [Share(self.parts, rank).sum() for rank in range(3)]
            assert torch.equal(sums[self.rank], x)
            return torch.cat(sums)
        short = x.numel() - self.parts[0].numel()
        return torch.cat(
            [torch.nn.functional.pad(p.reshape(1, -1), (0, short)) for p in self.parts]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_without_all_to_all_has_the_same_sums(dtype, monkeypatch):
    torch.manual_seed(4)
    parts = [torch.randn(6, 7).to(dtype) for _ in range(3)]
    assert torch.equal(
        InOrder(Older(parts)).reduce_scatter(parts[1]),
        InOrder(Group(parts)).reduce_scatter(parts[1]),
    )
    for odd in (parts, [p[:5] for p in parts]):
        few = InOrder(Older(odd)).all_reduce(odd[1])
        with monkeypatch.context() as patch:
            patch.setattr("ds_runtime.parallel.sums.in_order.MANY", 1)
            assert torch.equal(InOrder(Older(odd)).all_reduce(odd[1]), few)
