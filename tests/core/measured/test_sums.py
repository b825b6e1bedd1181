"""Kinds of all-reduce that a plan has: from files of costs, for ranks of one number, or none."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.crossing import Crossing
from ds_runtime.assembly.plan import check_against
from ds_runtime.assembly.room import reserve
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.engine.process.ranks import differences
from ds_runtime.errors import ConfigError
from ds_runtime.measured import found
from ds_runtime.measured.costs import Costs, KernelCost, Point
from ds_runtime.measured.sums import of
from ds_runtime.parallel.sums.kinds import (
    GATHER_LOGITS,
    LIBRARY,
    ONE_SHOT,
    TWO_SHOT,
    Sums,
    SumSizes,
)
from ds_runtime.predict.calls import crossed
from ds_runtime.predict.step import decode

CONFIG = Path(__file__).parents[2] / "launch_lines/configs/deepseek-v3-0324.json"
H200, ROW, SUMS = "NVIDIA H200", 7168 * 2, 122 + 1
UNMEASURED = (
    "all-reduces of 4 ranks are the library's: no other kind was measured on this device; run "
    "ds-runtime tune comm --ranks 4"
)
SIZES = [1 << power for power in range(12, 25)]


def curves(one_shot=1 << 19, two_shot=1 << 22, scale=1.0):
    """Of kinds that are the fastest up to these sizes."""
    return {
        LIBRARY: tuple((n, 2e-5 * scale) for n in SIZES),
        ONE_SHOT: tuple((n, (1e-5 if n <= one_shot else 9e-5) * scale) for n in SIZES),
        TWO_SHOT: tuple((n, (1.5e-5 if n <= two_shot else 8e-5) * scale) for n in SIZES),
    }


def costs(by_ranks, device=H200):
    kernels = {"a.b:apply": KernelCost("linear", "bfloat16", (Point(1, 1, 1, 1),))}
    collectives = {}
    for ranks, kinds in by_ranks.items():
        for kind, points in kinds.items():
            collectives.setdefault(kind, {})[ranks] = points
    rates = (1e9, {"bfloat16": 1e12}, 1.0, 1.0, 1.0)
    return Costs(device, "sm90", "2026-01-02", {}, *rates, kernels, collectives)


LAST = 1 << 22


def gathers():
    """Of the head's logits, one kernel being the faster up to LAST."""
    return {
        GATHER_LOGITS: tuple((n, 1e-5 if n <= LAST else 9e-5) for n in SIZES),
        "all_gather": tuple((n, 2e-5) for n in SIZES),
    }


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "v3").mkdir()
    shutil.copy(CONFIG, tmp_path / "v3/config.json")
    return str(tmp_path / "v3")


def made(folder, device="h200", **given):
    return assemble(EngineConfig(model=folder, **given), given, device=device)


def test_without_a_measurement_the_library_serves_and_the_plan_says_why(home):
    assembly = made(home, tp=4)
    assert assembly.sums.sizes == SumSizes()
    assert assembly.plan.sums == UNMEASURED


def test_measured_sizes_are_in_the_plan_its_bytes_its_memory_and_its_prediction(home, capsys):
    before = made(home, tp=4)
    costs({4: curves(), 2: curves(1 << 13, 1 << 14)}).write(found.own(H200))
    assembly = made(home, tp=4)
    assert assembly.sums.sizes.upto == ((ONE_SHOT, 1 << 19), (TWO_SHOT, 1 << 22))
    said = "one_shot up to 512 KiB, two_shot up to 4 MiB, all_reduce of the library above"
    assert assembly.plan.sums == f"all-reduces of 4 ranks by measured sizes: {said}"
    assert reserve(assembly).communication - reserve(before).communication == 1 << 22
    crossing, old = Crossing.of(assembly), Crossing.of(before)
    for rows, kind, share in ((1, ONE_SHOT, 3), (36, ONE_SHOT, 3), (37, TWO_SHOT, 1.5)):
        assert crossing.sum_kind(rows) == kind and old.sum_kind(rows) == LIBRARY
        more = crossing.wire(61, rows).row - old.wire(61, rows).row
        assert more == pytest.approx(SUMS * (share - 1.5) * ROW)
        count, nbytes = crossing.summed(rows, 61)[1:]
        assert crossing.summed(rows, 61)[0] == kind and count == SUMS
        assert nbytes == pytest.approx(SUMS * share * rows * ROW)
        told = crossing.received([rows], 1, 61) - old.received([rows], 1, 61)
        assert told == pytest.approx(rows * more)
    assert crossing.sum_kind(300) == LIBRARY
    kinds = [[one.kind for one in crossed(assembly, decode(n, 64))][:2] for n in (1, 128, 512)]
    assert kinds == [[kind] * 2 for kind in (ONE_SHOT, TWO_SHOT, LIBRARY)]
    costs({8: curves()}).write(found.own(H200))
    assert main(["plan", "--model", home, "--device", "h200", "--tp", "8"]) == 0
    assert f"\nall-reduces of 8 ranks by measured sizes: {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 8},  # another number of ranks
        {"tp": 8, "dp": 2, "enable_dp_attention": True, "disable_custom_all_reduce": True},
        {"tp": 4, "disable_custom_all_reduce": True},
    ],
    ids=str,
)
def test_what_was_measured_for_other_ranks_or_is_off_is_not_used(home, flags):
    costs({4: curves()}).write(found.own(H200))
    assembly = made(home, **flags)
    assert assembly.sums.sizes == SumSizes() and "are the library's" in assembly.plan.sums
    off = "for --disable-custom-all-reduce" in assembly.plan.sums
    assert off == flags.get("disable_custom_all_reduce", False)


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("h200", {"tp": 8, "nnodes": 2, "dist_init_addr": "h:1"}),
        ("h200", {"tp": 16}),
        ("h200", {}),
        ("l40s", {"tp": 4}),  # shares no memory
    ],
    ids=str,
)
def test_where_no_other_kind_can_serve_nothing_is_read_and_said(home, device, flags):
    path = found.own(H200)
    path.parent.mkdir(parents=True)
    path.write_text("no costs")
    assembly = made(home, device=device, **flags)
    assert assembly.sums.sizes == SumSizes() and not assembly.plan.sums
    assert "sums" not in assembly.plan.to_dict()


@pytest.mark.parametrize(
    "flags",
    [
        {"batch_invariant": True},  # sums are in the order of the ranks
        {"dp": 4, "enable_dp_attention": True},  # nobody divides heads
    ],
    ids=str,
)
def test_ranks_whose_sums_have_no_kind_gather_logits_all_the_same(home, flags):
    costs({4: curves() | gathers()}).write(found.own(H200))
    assembly = made(home, tp=4, **flags)
    assert assembly.sums == Sums(assembly.sums.sizes, "", "batch_invariant" in flags, gathered=LAST)
    assert assembly.sums.sizes == SumSizes() and not assembly.plan.sums


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ({"tp": 4}, LAST),
        ({"tp": 8, "dp": 2, "enable_dp_attention": True}, 0),  # its eight ranks were not measured
        ({"tp": 4, "disable_custom_all_reduce": True}, 0),
        ({"tp": 4, "dtype": "float32"}, 0),
    ],
    ids=str,
)
def test_logits_are_gathered_as_was_measured(home, flags, most):
    before = made(home, **flags)
    costs({4: curves() | gathers()}).write(found.own(H200))
    assembly = made(home, **flags)
    assert (before.sums.gathered, assembly.sums.gathered) == (0, most)
    said = f"one kernel gathers logits of up to {LAST >> 20} MiB"
    assert (assembly.sums_said()[-1:] == [said]) == (most > 0)
    if flags != {"tp": 4}:
        return
    lost = assembly.summing(replace(assembly.sums, gathered=0))
    assert said not in lost.sums_said()
    assert differences(*(json.dumps(one.plan.to_dict()) for one in (lost, assembly))) == [
        f"gathered: 0 here, {LAST} there"
    ]
    assert lost.plan.digest() != assembly.plan.digest()
    held = reserve(assembly).communication - reserve(lost).communication
    assert held == 2 * LAST // 4
    row = Crossing.of(assembly).logits
    for rows in (1, LAST // row, LAST // row + 1):
        kinds = [[*crossed(one, decode(rows, 64))][-1].kind for one in (assembly, lost)]
        assert kinds == [GATHER_LOGITS if rows * row <= LAST else "all_gather", "all_gather"]


@pytest.mark.parametrize("vocab", [129280, 129287, 129288])
def test_parts_that_no_kernel_takes_have_none(home, vocab):
    """Each of two ranks has half the vocabulary, rounded up."""
    path = Path(home) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": vocab}))
    costs({2: curves() | gathers()}).write(found.own(H200))
    assert made(home, tp=2).sums.gathered == (LAST if -(-vocab // 2) % 8 == 0 else 0)


@pytest.mark.parametrize("kinds", [(GATHER_LOGITS,), ("all_gather",), ()])
def test_a_gather_that_was_not_compared_does_not_serve(home, kinds):
    costs({4: curves() | {kind: gathers()[kind] for kind in kinds}}).write(found.own(H200))
    assert made(home, tp=4).sums.gathered == 0


def test_groups_of_attention_count_not_all_ranks(home):
    costs({4: curves()}).write(found.own(H200))
    assembly = made(home, tp=8, dp=2, enable_dp_attention=True)
    assert assembly.sums.sizes.most == 1 << 22 and "of 4 ranks" in assembly.plan.sums


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: "{", "write it with ds-runtime tune costs"),
        (lambda raw: json.dumps(raw | {"device": "NVIDIA L40S"}), "are of NVIDIA L40S, not of"),
        (lambda raw: json.dumps(raw | {"format": 9}), "not costs of format 1"),
        (lambda raw: cut(raw, "0", [[4096, 1e-5]]), "number of ranks"),
        (lambda raw: cut(raw, "4", []), "collectives.one_shot.4"),
        (lambda raw: cut(raw, "4", [[4096, -1]]), r"collectives.one_shot.4\[0\]"),
        (lambda raw: cut(raw, "4", [[8192, 1e-5], [4096, 1e-5]]), "sizes must rise"),
        (lambda raw: cut(raw, "4", [[4096, 1e-5]], "three_shot"), "collectives.three_shot"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong_in_it(home, change, why):
    path = found.own(H200)
    costs({4: curves()}).write(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ConfigError, match=why) as caught:
        made(home, tp=4)
    assert str(caught.value).startswith(f"costs {path}: ")
    made(home, tp=4, disable_custom_all_reduce=True)  # it is not read then


def cut(raw, ranks, points, kind=ONE_SHOT):
    """The file with other points of a kind."""
    raw["collectives"].setdefault(kind, {})[ranks] = points
    return json.dumps(raw)


def test_ranks_with_other_files_differ_and_are_told(home, tmp_path):
    """Rank 0 compares plans by their digest, and tells the sentences that `differences` returns."""
    plans = []
    for limits in (1 << 19, 1 << 15):
        costs({4: curves(limits)}).write(found.own(H200))
        plans.append(made(home, tp=4).plan)
    found.own(H200).unlink()
    plans.append(made(home, tp=4).plan)
    assert len({plan.digest() for plan in plans}) == 3
    for other, sizes in ((plans[1], "one_shot up to 32 KiB"), (plans[2], "no other kind")):
        (said,) = differences(*(json.dumps(one.to_dict()) for one in (plans[0], other)))
        assert said.startswith(
            "sums: 'all-reduces of 4 ranks by measured sizes: one_shot up to 512"
        )
        assert sizes in said
    check_against(plans[0], locked(tmp_path, plans[0]))
    with pytest.raises(ConfigError, match=r"differs: sums: .all-reduces of 4 ranks are the lib"):
        check_against(plans[2], str(tmp_path / "plan.json"))


@pytest.mark.parametrize("limits", [1 << 19, 1 << 11])  # below all sizes: the library's serves all
def test_ranks_whose_files_lead_to_the_same_sizes_work_together(home, tmp_path, limits):
    """Whatever digits the files have, and whatever the sentences say."""
    plans = []
    for scale in (1.0, 1.25):
        costs({4: curves(limits, limits, scale)}).write(found.own(H200))
        plans.append(made(home, tp=4).plan)
    if limits < SIZES[0]:
        found.own(H200).unlink()
        plans.append(made(home, tp=4).plan)
        plans.append(made(home, tp=4, disable_custom_all_reduce=True).plan)
        assert len({plan.sums for plan in plans}) == 3
    for one, other in itertools.permutations(plans, 2):
        assert one.digest() == other.digest()
        assert differences(*(json.dumps(plan.to_dict()) for plan in (one, other))) == []
        check_against(one, locked(tmp_path, other))


def locked(folder, plan):
    (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
    return str(folder / "plan.json")


def test_other_differences_of_plans_are_told(home):
    plain = made(home, tp=4).plan
    noted = replace(plain, rows=(replace(plain.rows[0], note="other"), *plain.rows[1:]))
    given = [json.dumps(one.to_dict()) for one in (plain, noted)]
    assert differences(*given) == ["other notes, ranks or refusals"]
    assert differences(given[0], given[0]) == []
    for other in ("", "no JSON", "[]", "null", '"text"'):
        assert differences(given[0], other) == ["a plan that cannot be read"]
    assert differences(given[0], "{}")


def test_kinds_need_the_librarys_curve_beside_them():
    kinds = curves()
    assert of(costs({4: kinds}), 8) is None
    assert of(costs({4: {LIBRARY: kinds[LIBRARY]}}), 4) is None
    assert of(costs({4: {ONE_SHOT: kinds[ONE_SHOT]}}), 4) is None
    found = of(costs({4: {LIBRARY: kinds[LIBRARY], TWO_SHOT: kinds[TWO_SHOT]}}), 4)
    assert found.upto == ((TWO_SHOT, 1 << 22),)


@pytest.mark.parametrize(("dtype", "serves"), [("bfloat16", True), ("float16", False)])
def test_a_dtype_that_no_other_kind_sums_is_the_librarys(home, dtype, serves):
    costs({4: curves()}).write(found.own(H200))
    assembly = made(home, tp=4, dtype=dtype)
    assert bool(assembly.sums.sizes.upto) == serves
    why = f"all-reduces of 4 ranks are the library's: no other kind sums {dtype}"
    assert (assembly.plan.sums == why) != serves
    assert Crossing.of(assembly).sum_kind(1) == (ONE_SHOT if serves else LIBRARY)


UPTO = ((ONE_SHOT, 1 << 19), (TWO_SHOT, 1 << 22))


@pytest.mark.parametrize("lost", [(ONE_SHOT,), (TWO_SHOT,), (ONE_SHOT, TWO_SHOT)])
def test_kinds_that_ranks_could_not_set_up_are_in_no_plan_and_no_count(home, lost):
    costs({4: curves()}).write(found.own(H200))
    assembly = made(home, tp=4)
    assert assembly.summing(Sums(SumSizes(UPTO), normed=True)) is assembly
    plain = assembly.summing(Sums(SumSizes(UPTO)))
    assert plain.plan == assembly.plan and assembly.sums_said() == [
        *plain.sums_said(),
        "one_shot sums are one kernel with the add and the norm after them",
    ]
    left = SumSizes(tuple(one for one in UPTO if one[0] not in lost))
    other = assembly.summing(Sums(left))
    assert other.plan.sums == (
        f"all-reduces of 4 ranks: {left}; more was measured, and ranks could not set it up: the "
        "log says why"
    )
    assert other.plan.digest() != assembly.plan.digest()
    for rows in (1, 36, 37, 292, 293):
        kind = Crossing.of(other).sum_kind(rows)
        assert kind == left.kind(rows * ROW) and kind not in lost
        assert Crossing.of(other).summed(rows, 61)[0] == kind
