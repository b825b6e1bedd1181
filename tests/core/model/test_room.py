"""What a device of its own memory has room for, over devices, models and flags."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.assembly.assemble import assemble
from ds_runtime.assembly.estimate import (
    decode_bytes,
    needed_bytes,
    page_table_bytes,
    positions_of,
    saved_bytes,
    second_form_bytes,
    step_bytes,
)
from ds_runtime.assembly.result import Assembly
from ds_runtime.assembly.room import (
    REQUEST_TOKENS,
    REQUESTS,
    idle_room,
    kv_room,
    requests_that_fit,
    reserve,
    said,
)
from ds_runtime.cli import main
from ds_runtime.common.progress import amount
from ds_runtime.config import EngineConfig
from ds_runtime.errors import PluginError
from ds_runtime.kv.budget import Room, kv_memory
from ds_runtime.ops.contracts.caches import LaidGroup, StateGroup
from ds_runtime.ops.kernel import Footprint
from examples import examples

FIXTURES = Path(__file__).parent / "fixtures"
GB = 10**9
DEVICES = {  # name → layouts of V3 that fit there, V2-Lite fits on one
    "h100": (16,),
    "h200": (8,),
    "mi300x": (8,),
    "b200": (8,),
    "910b": (32,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def made(name):
        at = tmp_path_factory.mktemp(name)
        shutil.copy(FIXTURES / f"deepseek-{name}.json", at / "config.json")
        return str(at)

    known = {name: made(name) for name in ("v2-lite", "v3")}
    return known.__getitem__


def settled(model, device, **flags):
    return assemble(EngineConfig(model=model, **flags), tuple(flags), device=device)


def forms(assembly):
    return second_form_bytes(assembly.binding, assembly.config.dtype)


@settings(max_examples=examples(300), deadline=None)
@given(
    total=st.integers(1, 200 * GB),
    weights=st.integers(0, 250 * GB),
    others=st.integers(0, 50 * GB),
    reserved=st.integers(0, 50 * GB),
    fraction=st.none() | st.floats(0.01, 1.0),
)
def test_weights_cache_and_steps_never_take_more_than_the_device_has(
    total, weights, others, reserved, fraction
):
    before, config = total - others, EngineConfig(mem_fraction_static=fraction)
    room = kv_room(config, total, before, before - weights, reserved)
    if fraction is None:
        assert room == min(int(0.9 * total), total - reserved) - weights - others
        assert others + weights + room + reserved <= total
        assert others + weights + room <= 0.9 * total
    else:
        assert abs(room - (fraction * before - weights)) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_defaults_fill_the_device_and_leave_what_steps_need(folder, device, name):
    for tp in DEVICES[device] if name == "v3" else (1,):
        for divided in (False, True)[: 1 + (tp > 1 and device != "910b")]:  # there it does not fit
            found = settled(folder(name), device, tp=tp, enable_dp_attention=divided)
            total, room = found.device.memory, idle_room(found)
            kept = reserve(found)
            assert needed_bytes(found) + room + kept.total <= total
            assert room == min(int(0.9 * total), total - kept.total) - needed_bytes(found)
            assert room >= positions_of(found) // found.config.page_size * found.cache_sizes.page
            tokens = (
                room // found.cache_sizes.page * found.config.page_size * (tp if divided else 1)
            )
            count = found.config.max_running_requests
            assert count == REQUESTS or tokens < REQUESTS * REQUEST_TOKENS
            assert count * REQUEST_TOKENS <= tokens
            if count < REQUESTS:
                more = count + (1 if count < 8 else 8)
                wider = replace(found, config=replace(found.config, max_running_requests=more))
                size, ranks = found.config.page_size, tp if divided else 1
                tokens = idle_room(wider) / wider.cache_sizes.page * size * ranks
                assert more * REQUEST_TOKENS > tokens, "the largest number that fits"
            told = next(c for c in found.plan.changes if c[0] == "max_running_requests")
            assert told[1] == f"64 → {count}"


WINDOW = StateGroup("near", tuple(range(27)), rows=128)
own_caches = Assembly.caches.func


def with_window(assembly):
    """The groups of the model, and a state of 128 tokens in every layer."""
    own = own_caches(assembly)
    return *own, LaidGroup(WINDOW, own[0].layout, WINDOW.within(assembly.binding.base))


@pytest.mark.parametrize("asked", [None, 0, 700])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_plan_and_start_hold_the_same_beside_states(folder, monkeypatch, device, asked):
    """As many requests as get their states and REQUEST_TOKENS, and tokens that the start gives."""
    monkeypatch.setattr(Assembly, "caches", property(with_window))
    found = settled(folder("v2-lite"), device)
    with_count = replace(found.config, state_snapshots=asked)
    found = replace(found, config=with_count)
    found = replace(
        found, config=replace(with_count, max_running_requests=requests_that_fit(found))
    )
    total, context = found.device.memory, positions_of(found)
    room = Room(total, total, total - needed_bytes(found))
    memory = kv_memory(found, room, context)
    tokens = memory.pages * found.config.page_size
    assert 0 < memory.total <= idle_room(found)
    assert found.config.max_running_requests * REQUEST_TOKENS <= tokens
    assert f"({tokens} tokens, " in said(found)[0]
    held = memory.states * memory.sizes.state
    assert f"{amount(held)} for states, {memory.snapshots} snapshots among them" in said(found)[0]
    if asked is None:
        assert 100 * memory.snapshots * memory.sizes.state <= 15 * memory.total
    else:
        assert memory.snapshots == asked


def test_a_cpu_and_what_the_user_says_keep_their_number(folder):
    assert (
        settled(folder("v2-lite"), "h200", max_running_requests=7).config.max_running_requests == 7
    )
    cpu = assemble(EngineConfig(model=folder("v2-lite"), platform="cpu"))
    assert cpu.config.max_running_requests == 64


def test_sizes_to_capture_that_are_named_are_never_above_the_number_of_requests(folder):
    flags = {"tp": 8, "graph_sizes": (1, 400)}
    assert settled(folder("v3"), "h200", **flags).config.max_running_requests == 400


@pytest.mark.parametrize("context", [None, 512, 4096, 32768])
@pytest.mark.parametrize("memory_for_speed", ["auto", "off", "all"])
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_second_forms_leave_the_cache_what_it_is_to_keep(folder, device, memory_for_speed, context):
    longest = {"context_length": context} if context else {}
    flag = {"memory_for_speed": memory_for_speed}
    found = settled(folder("v2-lite"), device, **flag, **longest)
    bare = settled(folder("v2-lite"), device, memory_for_speed="off", **longest)
    every = settled(folder("v2-lite"), device, memory_for_speed="all", **longest)
    here, there = forms(found), forms(every)
    assert not forms(bare) and set(there) == {"linear", "experts"}
    if memory_for_speed != "auto":
        assert here == ({} if memory_for_speed == "off" else there)
        return
    contexts = REQUESTS * -(-positions_of(found) // found.config.page_size) * found.cache_sizes.page
    wanted = min(contexts, 0.6 * idle_room(bare))
    assert idle_room(found) >= wanted - 1
    assert "experts" not in here or "linear" in here  # those of experts go first
    if here != there:  # and not without need
        assert idle_room(every) < wanted
    listed = {form.op: form for form in found.forms}
    assert {op for op, form in listed.items() if form.kept} == set(here)
    for op, form in listed.items():
        assert form.nbytes == int(there[op])
        lost = form.nbytes / found.cache_sizes.page * found.config.page_size
        assert abs(form.tokens - lost) <= 1


def test_kv_memory_and_the_fraction_decide_on_second_forms_too(folder):
    assert set(forms(settled(folder("v2-lite"), "h200", kv_memory=100 * GB))) == {"linear"}
    assert set(forms(settled(folder("v2-lite"), "h200", kv_memory=10 * GB))) > {"linear"}
    assert not forms(settled(folder("v2-lite"), "h200", mem_fraction_static=0.21))


def test_the_plan_says_what_the_device_holds_and_what_each_copy_costs(folder, capsys):
    plan = ["plan", "--model", folder("v2-lite"), "--device", "h200"]
    assert main(plan) == 0
    said = capsys.readouterr().out
    for part in (
        "KV cache",
        "full contexts of 163840",
        "copy experts: 22.5 GB",
        "of a decode step",
    ):
        assert part in said
    assert said.count(": kept") == 2
    assert "; kept free for steps" in said
    for flags, lacks in (
        (["--mem-fraction-static", "0.9"], False),
        (["--mem-fraction-static", "1"], True),
        (["--kv-memory", "20GB"], False),
        (["--kv-memory", "118GB"], True),
    ):
        assert main([*plan, *flags]) == 0
        said = capsys.readouterr().out
        assert ("more than there is: a step may run out of memory" in said) == lacks
        assert ("kept free for steps" in said) != lacks
    assert main([*plan, "--memory-for-speed", "off"]) == 0
    assert capsys.readouterr().out.count(": left out") == 2


@pytest.mark.parametrize("memory_for_speed", ["auto", "off", "all"])
@pytest.mark.parametrize("pin", ["experts=cuda.ExpertsDense12", "linear@*.o_proj=cuda.LinearFew12"])
def test_who_pins_a_kernel_keeps_its_form(folder, pin, memory_for_speed):
    """Whatever else is said, and however little it leaves."""
    flags = {"pin": (pin,), "memory_for_speed": memory_for_speed, "disable_graph": True}
    found = settled(folder("v2-lite"), "h100", **flags)
    op = pin.partition("=")[0].partition("@")[0]
    assert op in forms(found) and {f.op: f.kept for f in found.forms}[op]


@pytest.mark.parametrize("tp", [1, 8])
def test_rows_with_bits_of_their_own_take_more(folder, tp):
    """Every token of a prompt is absorbed, as a row of its own, and sums hold what they add."""
    flags = {"tp": tp, "page_size": 64}
    plain, own = (
        settled(folder("v3"), "h200", **flags, batch_invariant=asked) for asked in (False, True)
    )
    tokens, heads = own.config.max_step_tokens, 128 // tp
    taken = reserve(own)
    absorbed = tokens * heads * (128 + 64 + 64 + 512 + 64 + 512) * 2
    tables = tokens * -(-positions_of(own) // 64) * 4
    hidden = 4 * tokens * 7168 * 2
    assert page_table_bytes(own) == tables > 10 * page_table_bytes(plain)
    assert step_bytes(own, tokens, 0) == hidden + absorbed > step_bytes(plain, tokens, 0)
    held = step_bytes(own, tokens, tokens) + tables + decode_bytes(own)
    assert taken.activations >= held > tables + absorbed
    assert (taken.communication > reserve(plain).communication) == (tp > 1)
    assert 100_000_000 < decode_bytes(own) < 200_000_000  # of pieces, at a time


@pytest.mark.parametrize("device", ["h200", "xeon-6980p"])
@pytest.mark.parametrize("absorbed", [0, 1, 5000])
def test_rows_that_attend_latents_have_their_workspace(folder, monkeypatch, device, absorbed):
    """Of a kernel that says so, whatever number of rows is absorbed."""
    monkeypatch.setattr("ds_runtime.assembly.estimate.most_absorbed", lambda _: absorbed)
    made = settled(folder("v2-lite"), device, load_format="dummy")
    held = Footprint(workspace=lambda facts, rows: rows * 10_000_000)
    choices = [
        (s, replace(k, footprint=held) if s.op == "mla_decode" else k)
        for s, k in made.binding.choices
    ]
    wide = replace(made, binding=replace(made.binding, choices=tuple(choices)))
    rows = max(absorbed, made.config.max_running_requests)
    assert decode_bytes(wide) == rows * 10_000_000
    more = reserve(wide).activations - reserve(made).activations
    assert more == rows * 10_000_000 - decode_bytes(made)
    room = Room(total=20 * GB, before=20 * GB, free=14 * GB)
    plain, less = (kv_memory(one, room, 163840).total for one in (made, wide))
    assert (plain > less) == (rows * 10_000_000 > decode_bytes(made)), "it is not the cache's"


PARTS = [(8, 1), (8, 2), (8, 8), (4, 4)]
WHERE = [{}, {"enable_dp_attention": True}, {"fusion": ("shared_experts=on",)}]


@pytest.mark.parametrize("more", WHERE, ids=["plain", "groups", "shared"])
@pytest.mark.parametrize(("tp", "ep"), PARTS)
def test_steps_hold_rows_as_wide_as_a_rank_s_experts(folder, tp, ep, more):
    made = settled(folder("v3"), "h200", load_format="dummy", tp=tp, ep=ep, **more)
    (width,) = {s.shape[1] for s, _ in made.binding.choices if s.op == "experts"}
    assert made.facts.dims["moe_intermediate"] == width == 2048 * ep // tp
    rows = 8 * (2 * 7168 + 3 * width)  # of every token and chosen expert
    for tokens in (1, 100):
        assert step_bytes(made, 0, tokens) >= tokens * rows * 2


@pytest.mark.parametrize("more", WHERE, ids=["plain", "groups", "shared"])
@pytest.mark.parametrize(("tp", "ep"), PARTS)
def test_what_second_forms_of_experts_save(folder, tp, ep, more):
    """No kernel of experts that skips those of other parts has such a form yet: one that would."""
    made = settled(folder("v3"), "h200", load_format="dummy", tp=tp, ep=ep, **more)
    choices = [
        (s, replace(k, footprint=Footprint(second_form=0.75)) if s.op == "experts" else k)
        for s, k in made.binding.choices
    ]
    binding = replace(made.binding, choices=tuple(choices), shares={})
    held = {s.shape[0] for s, _ in choices if s.op == "experts"}.pop()
    chosen = 8 / ep + held - 256 // ep  # of a token, with slots of shared experts
    whole = second_form_bytes(binding, made.config.dtype)["experts"] / 0.75
    saved = saved_bytes(made.model, binding, made.config.dtype)["experts"]
    assert saved == pytest.approx(whole / 4 * chosen / held)


@pytest.fixture(scope="module")
def lite(folder):
    return settled(folder("v2-lite"), "h100")


def told(found, op, workspace):
    """The same with kernels of an op that say so what they hold."""
    choices = tuple(
        (s, replace(k, footprint=Footprint(workspace=workspace)) if s.op == op else k)
        for s, k in found.binding.choices
    )
    return replace(found, binding=replace(found.binding, choices=choices))


def raising(facts, rows):
    raise KeyError("mla_heads")


ANSWERS = {
    "raises": (raising, "KeyError: 'mla_heads'"),
    "leaves": (lambda facts, rows: sys.exit("no licence"), "SystemExit: no licence"),
    "takes one": (lambda facts: 1, "TypeError: "),
    **{
        f"returns {value!r}": (lambda facts, rows, value=value: value, f"returned {value!r}: give")
        for value in (None, math.nan, -1, -0.5, math.inf, -math.inf, "4096", [1], 1j)
    },
}


@pytest.mark.parametrize(("workspace", "said"), ANSWERS.values(), ids=ANSWERS)
def test_a_kernel_that_does_not_say_what_it_holds_is_blamed(lite, workspace, said):
    found = told(lite, "mla_decode", workspace)
    (name,) = {k.name for s, k in found.binding.choices if s.op == "mla_decode"}
    for ask in (decode_bytes, reserve):
        with pytest.raises(PluginError) as caught:
            ask(found)
        assert str(caught.value).startswith(f"{name}: Footprint.workspace failed: ")
        assert said in str(caught.value) and "ds-runtime plugins --verbose" in str(caught.value)


@given(st.one_of(st.integers(0, 1 << 50), st.floats(0, 2.0**50)))
def test_a_workspace_is_reserved_to_the_byte(lite, held):
    found = told(lite, "mla_decode", lambda facts, rows: held)
    assert decode_bytes(found) == int(held) and isinstance(decode_bytes(found), int)
