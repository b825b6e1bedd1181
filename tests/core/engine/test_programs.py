"""Which phases run a step, and that whoever runs them has each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_runtime.engine.device.op_by_op import OpByOp
from ds_runtime.engine.device.programs import PROGRAMS, WAIT, kind_of, run
from ds_runtime.engine.device.replayed import Replayed
from ds_runtime.engine.step.plan import StepPlan, Work


def plan(*lengths, prompts=(), drafts=0):
    works = [Work(rid="", row=0, start=9, length=n, pages=[]) for n in lengths]
    works += [Work(rid="", row=0, start=0, length=n, pages=[], tokens=[1] * n) for n in prompts]
    return StepPlan(step=0, works=works, drafts=drafts)


@pytest.mark.parametrize(
    ("made", "alone", "speculates"),
    [
        (plan(1, 1), "decode", "decode"),
        (plan(), "decode", "decode"),
        (plan(1, prompts=[5]), "prompts", "prompts, verify"),
        (plan(1, 3), "decode", "verify"),
        (plan(1, drafts=2), "decode", "draft"),
        (plan(3, 3, drafts=2), "decode", "draft"),
        (plan(3, prompts=[5], drafts=2), "prompts", "prompts, draft"),
    ],
)
def test_the_kind_of_a_step(made, alone, speculates):
    assert (kind_of(made, False), kind_of(made, True)) == (alone, speculates)


def test_each_phase_is_had_by_all_who_may_run_it_and_runs_somewhere():
    named = {phase for phases in PROGRAMS.values() for phase in phases} - {WAIT}
    both = {name for name in vars(OpByOp) if name in vars(Replayed)}
    assert {name for name in both if name[0] != "_"} == named - {"score"} | {"begin"}
    assert callable(OpByOp.score)  # of prompts, which nobody replays
    for kind, phases in PROGRAMS.items():
        assert phases[:2] == ("inputs", "forward") and len({*phases}) == len(phases)
        assert ("score" in phases) == kind.startswith("prompts")
        assert ("draft" in phases) == (WAIT in phases) == ("tell" in phases)


@given(st.sampled_from(sorted(PROGRAMS)), st.booleans())
def test_a_step_runs_its_phases_in_order_and_stops_where_the_host_waits(kind, draws):
    """Where no work draws, nothing is left; else what is behind, and no earlier."""
    ran = []

    class Who:
        def begin(self, handle, judges):
            ran.append(("begin", judges))
            return SimpleNamespace(drafting=None)

        def __getattr__(self, phase):
            def call(step):
                ran.append(phase)
                if phase == "tell" and draws:
                    step.drafting = object()

            return call

    rest, phases = run(Who(), None, kind), PROGRAMS[kind]
    at = phases.index(WAIT) if WAIT in phases else len(phases)
    assert ran == [("begin", "judge" in phases), *phases[:at]]
    assert (rest is not None) == (draws and WAIT in phases)
    if rest is not None:
        rest()
        assert ran[1:] == [p for p in phases if p != WAIT]
