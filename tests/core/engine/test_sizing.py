"""Chunks of prompts for a gap between tokens, on simulated machines."""

from __future__ import annotations

import random
import statistics
from dataclasses import astuple, dataclass, replace

import pytest
from fake_device import VOCAB, Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_runtime.config import EngineConfig
from ds_runtime.engine.messages import Stats
from ds_runtime.engine.schedule.chunk_sizes import Sizing
from ds_runtime.engine.schedule.step_cost import Load, StepCost
from ds_runtime.engine.step.plan import StepPlan, Work
from ds_runtime.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: each thing in it costs so much."""

    step: float = 4e-3
    prompt: float = 1e-4
    token: float = 1e-5
    pair: float = 1e-9
    prefix: float = 2e-7
    row: float = 2e-5
    context: float = 1e-9
    loaded: float = 1e-5
    noise: float = 0.03

    def seconds(self, load: Load, chance: random.Random | None = None) -> float:
        total = self.step + self.prompt * load.prompts + self.token * load.tokens
        total += self.pair * load.pairs + self.prefix * load.prefix
        total += self.row * load.rows + self.context * load.context
        total += self.loaded * load.loaded
        return total * (1 if chance is None else chance.uniform(1 - self.noise, 1 + self.noise))


MACHINES = st.builds(
    Machine,
    step=st.floats(1e-4, 0.03),
    prompt=st.floats(0, 2e-3),
    token=st.floats(1e-6, 1e-3),
    pair=st.floats(0, 1e-7),
    prefix=st.floats(0, 1e-5),
    row=st.floats(0, 1e-3),
    context=st.floats(0, 1e-7),
    loaded=st.floats(0, 1e-3),
)


def load_of(prompts, rows=0, context=0, loaded=0) -> Load:
    load = Load(rows=rows, context=context, loaded=loaded)
    for start, length in prompts:
        load.add_prompt(start, length)
    return load


def draw_load(chance: random.Random) -> Load:
    prompts = [
        (chance.choice([0, chance.randrange(8000)]), chance.randrange(1, 2000))
        for _ in range(chance.randrange(1, 5))
    ]
    rows = chance.choice([0, chance.randrange(1, 256)])
    loaded = chance.choice([0, sum(start for start, _ in prompts) // 64])
    return load_of(prompts, rows, rows * chance.randrange(4000), loaded)


def learnt(machine: Machine, seed: int, steps: int = 150) -> tuple[StepCost, random.Random]:
    chance, cost = random.Random(seed), StepCost()
    for _ in range(steps):
        load = draw_load(chance)
        cost.note(load, machine.seconds(load, chance))
    return cost, chance


@given(MACHINES, st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_the_cost_of_a_step_is_learnt(machine, seed):
    cost, chance = learnt(machine, seed)
    wrong = []
    for _ in range(40):
        load = draw_load(chance)
        wrong.append(abs(cost.seconds(load) / machine.seconds(load) - 1))
    assert statistics.median(wrong) < 0.1
    assert sorted(wrong)[35] < 0.25


@given(MACHINES, st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_a_machine_that_becomes_slower_is_learnt_anew(machine, seed):
    cost, chance = learnt(machine, seed)
    slower = Machine(*(4 * value for value in astuple(machine)[:-1]))
    for _ in range(300):
        load = draw_load(chance)
        cost.note(load, slower.seconds(load, chance))
    loads = [draw_load(chance) for _ in range(40)]
    wrong = [abs(cost.seconds(load) / slower.seconds(load) - 1) for load in loads]
    assert statistics.median(wrong) < 0.1


@given(MACHINES, st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_steps_that_compiled_a_kernel_change_nothing_for_long(machine, seed):
    cost, chance = learnt(machine, seed)
    for number in range(60):
        load = draw_load(chance)
        seconds = machine.seconds(load, chance)
        cost.note(load, seconds if number % 7 else seconds + 60 * machine.seconds(load))
    loads = [draw_load(chance) for _ in range(40)]
    wrong = [abs(cost.seconds(load) / machine.seconds(load) - 1) for load in loads]
    assert statistics.median(wrong) < 0.1


@given(MACHINES, st.integers(0, 1 << 30), st.floats(1e-5, 1e-3))
@settings(max_examples=25, deadline=None)
def test_loading_is_not_learnt_as_what_cached_tokens_cost(machine, seed, loaded):
    """Sessions whose pages all come from host memory, among some whose pages are there."""
    machine, chance, cost = (
        replace(machine, prefix=0.0, loaded=loaded),
        random.Random(seed),
        StepCost(),
    )
    starts = [chance.randrange(500, 8000) for _ in range(160)]
    for number, start in enumerate(starts):
        load = load_of([(start, 100)], 4, 400, 0 if number % 4 == 0 else start // 64)
        cost.note(load, machine.seconds(load))
    here, back = load_of([(7000, 100)], 4, 400), load_of([(7000, 100)], 4, 400, 109)
    assert cost.seconds(here) == pytest.approx(machine.seconds(here), rel=0.1)
    assert cost.seconds(back) == pytest.approx(machine.seconds(back), rel=0.1)


def test_a_scheduler_tells_what_its_steps_load():
    rig, loads = Rig(16, 4, snapshots=None, host=200, max_itl=0.05), list[int]()
    note = rig.scheduler._sizing.cost.note

    def noted(load, seconds):
        loads.append(load.loaded)
        note(load, seconds)

    rig.scheduler._sizing.cost.note = noted
    rig.seconds = lambda plan: 1e-3
    long = list(range(1, 38))
    for number, prompt in enumerate([long, *([n, *range(2, 30)] for n in range(9)), long]):
        rig.submit(str(number), prompt, max_tokens=2)
        rig.run()
    assert sum(loads) == sum(len(plan.loads) for plan in rig.plans) == 9


MORE = st.tuples(st.integers(0, 100_000), st.integers(1, 16_384))


@given(
    MACHINES,
    st.integers(0, 1 << 30),
    st.lists(MORE, min_size=1, max_size=4),
    MORE,
    st.integers(0, 256),
    st.integers(0, 256),
)
@settings(max_examples=60, deadline=None)
def test_more_never_looks_cheaper(machine, seed, prompts, more, rows, others):
    cost, _ = learnt(machine, seed, 20)
    one = cost.seconds(load_of(prompts, rows))
    assert cost.seconds(load_of([*prompts, more], rows)) >= one >= 0
    assert cost.seconds(load_of(prompts, rows + others)) >= one
    (start, length), *rest = prompts
    assert cost.seconds(load_of([(start + more[0], length), *rest], rows)) >= one * (1 - 1e-9)
    assert cost.seconds(load_of([(start, length + more[1]), *rest], rows)) >= one


@given(MACHINES, st.integers(0, 1 << 30), st.integers(0, 100_000), st.floats(1e-4, 1))
@settings(max_examples=60, deadline=None)
def test_a_chunk_takes_the_time_that_it_was_made_for(machine, seed, start, seconds):
    cost, _ = learnt(machine, seed, 60)
    length = cost.chunk(start, seconds)
    if not 1 < length < 1e9:
        return
    alone = cost.seconds(Load())
    load = load_of([(start, round(length))])
    assert cost.seconds(load) - alone == pytest.approx(seconds, rel=0.02, abs=1e-4 + 1 / length)


def decodes(count: int, context: int) -> list[Work]:
    return [Work(rid=f"d{i}", row=i, start=context, length=1, pages=[]) for i in range(count)]


def serve_prompts(machine, sizing, prompts, rows, chance, context=500):
    """Steps of `rows` decodes with prompts (cached, new) behind each other; seconds of each step
    that carried some, and the chunks."""
    stats, waiting, gaps, chunks = Stats(), [list(p) for p in prompts], [], []
    for number in range(100_000):
        if not waiting:
            return gaps, chunks, stats
        plan = StepPlan(step=number, works=decodes(rows, context))
        room, taken = sizing.open(plan), []
        for prompt in waiting:
            length = room.take(prompt[0], min(prompt[1], 8192), len(waiting) > 1 + len(taken))
            if not length:
                break
            prompt[0], prompt[1] = prompt[0] + length, prompt[1] - length
            taken.append(length)
            if room.is_full:
                break
        waiting = [p for p in waiting if p[1]]
        assert taken or not prompts
        seconds = machine.seconds(room.load, chance)
        sizing.note(room, seconds, stats)
        gaps.append(seconds)
        chunks.append(taken)
    raise AssertionError("prompts make no progress")


def warm(machine, sizing, chance, rows):
    """Steps without prompts, and prompts of some lengths, as an engine meets them first."""
    for number in range(30):
        plan = StepPlan(step=number, works=decodes(rows, 500))
        room = sizing.open(plan)
        sizing.note(room, machine.seconds(room.load, chance), Stats())
    for length in (40, 900, 300, 2000, 120):
        serve_prompts(machine, sizing, [(0, length)], rows, chance)


@given(MACHINES, st.integers(0, 1 << 30), st.lists(MORE, min_size=8, max_size=12))
@settings(max_examples=30, deadline=None)
def test_steps_keep_to_the_gap_wherever_progress_allows_it(machine, seed, prompts):
    """After what is behind long contexts has been seen, too."""
    chance, sizing = random.Random(seed), Sizing(0.05, 16384, 8192)
    warm(machine, sizing, chance, 32)
    serve_prompts(machine, sizing, prompts[:-3], 32, chance)
    plain = machine.seconds(Load(rows=32, context=32 * 500))
    for prompt in prompts[-3:]:
        gaps, chunks, _ = serve_prompts(machine, sizing, [prompt], 32, chance)
        assert all(all(taken) for taken in chunks)
        target, start = max(0.05, 2 * plain), prompt[0]
        late = 0
        for gap, (length,) in zip(gaps, chunks, strict=True):
            allowed = machine.seconds(load_of([(start, 32)], 32, 32 * 500))
            fixed = machine.prompt + machine.prefix * start
            start += length
            late += gap > 1.35 * max(target, allowed, plain + 2 * fixed + 32 * machine.token)
        assert late <= max(2, 0.2 * len(gaps)), (late, gaps, chunks)


@pytest.mark.parametrize("gap", [0.02, 0.05, 0.1])
def test_the_gap_is_used(gap):
    """Chunks are as long as it allows, not shorter."""
    chance, sizing, machine = random.Random(1), Sizing(gap, 16384, 8192), Machine()
    warm(machine, sizing, chance, 64)
    gaps, _, stats = serve_prompts(machine, sizing, [(0, 30_000)] * 4, 64, chance)
    middle = statistics.median(gaps)
    assert 0.85 * gap < middle < 1.05 * gap
    assert sorted(gaps)[int(0.99 * len(gaps))] < 1.15 * gap
    assert stats.prefill_steps_cut > 0.8 * stats.prefill_steps
    assert stats.prefill_seconds_expected == pytest.approx(stats.prefill_seconds, rel=0.05)


@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_steps_that_vary_are_made_for_less_than_the_gap(noise):
    """So that all but a few stay within it; on a machine that does not vary nothing is given up."""
    chance, machine = random.Random(11), Machine(noise=noise)
    sizing = Sizing(0.05, 16384, 8192)
    warm(machine, sizing, chance, 64)
    serve_prompts(machine, sizing, [(0, 30_000)] * 12, 64, chance)
    gaps, _, _ = serve_prompts(machine, sizing, [(0, 30_000)] * 12, 64, chance)
    late = sum(gap > 0.05 for gap in gaps)
    assert len(gaps) > 60 and late < 0.12 * len(gaps)
    assert statistics.median(gaps) > 0.05 / (1 + 1.5 * noise)


def test_the_cached_prefix_counts():
    """Many chats behind long cached beginnings do not become one long step."""
    chance, machine = random.Random(3), Machine(prefix=2e-5)
    chats = [(3014, 20)] * 60
    all_at_once = machine.seconds(load_of(chats))
    sizing = Sizing(0.05, 2048, 512)
    warm(machine, sizing, chance, 8)
    serve_prompts(machine, sizing, [(3014, 20)] * 4, 8, chance)
    gaps, _, _ = serve_prompts(machine, sizing, chats, 8, chance)
    assert all_at_once > 3.5
    assert max(gaps) < 0.1
    gaps, _, _ = serve_prompts(machine, sizing, chats, 0, chance)  # and where nobody decodes
    assert max(gaps) < 0.2 * all_at_once


def test_without_a_gap_and_before_anything_is_known_nothing_is_limited():
    for sizing in (Sizing(0.0, 2048, 512), Sizing(1e-3, 2048, 512)):
        room = sizing.open(StepPlan(step=0, works=decodes(8, 100)))
        assert [room.take(0, 512, True) for _ in range(5)] == [512] * 5
        assert not room.is_full


def test_where_nobody_decodes_a_prompt_is_not_limited():
    chance, sizing, machine = random.Random(5), Sizing(0.02, 16384, 8192), Machine(token=1e-4)
    warm(machine, sizing, chance, 16)
    room = sizing.open(StepPlan(step=0, works=[]))
    assert room.take(100_000, 8192, True) == 8192


def test_a_cut_chunk_fills_a_captured_step():
    chance, machine, sizes = random.Random(7), Machine(token=1e-4), (64, 128, 256, 512)
    sizing = Sizing(0.05, 16384, 8192, sizes)
    warm(machine, sizing, chance, 16)
    _, chunks, _ = serve_prompts(machine, sizing, [(0, 6000)], 16, chance)
    assert len(chunks) > 5
    assert {length + 16 for (length,) in chunks[:-1]} <= set(sizes)


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=14),
    st.floats(1e-4, 3e-2),
    st.integers(0, 2),
    st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_a_scheduler_with_a_gap_answers_everything(requests, gap, overlap, seed):
    """Whatever steps take, every request gets its tokens, and no step that decodes is without
    progress of prompts for long."""
    rig = Rig(64, max_itl=gap, max_step_tokens=96, prefill_chunk=48, overlap=overlap)
    chance = random.Random(seed)
    rig.seconds = lambda plan: chance.uniform(1e-4, 5e-3) * sum(w.length for w in plan.works)
    for number, (length, count) in enumerate(requests):
        tokens = [chance.randrange(VOCAB) for _ in range(length)]
        rig.submit(f"r{number}", tokens, max_tokens=count)
        for _ in range(chance.randrange(3)):
            rig.step()
    rig.run()
    rig.check_end()


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e9])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"--max-itl .*: must be (from 0 to 1000000|a finite number)$"
    ):
        EngineConfig(max_itl=value)


def test_time_and_the_same_bits_do_not_go_together():
    with pytest.raises(ConfigError, match=r"--max-itl 30 with --deterministic: .* leave one"):
        EngineConfig(max_itl=30.0, deterministic=True)
    assert EngineConfig(deterministic=True, max_itl=0.0).max_itl == 0
