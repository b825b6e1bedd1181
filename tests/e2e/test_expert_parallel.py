"""Routed experts divided by number among real ranks over Gloo: the answers of one rank."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_dp_attention import SETTINGS, ask, same

from ds_runtime import LLM, SamplingParams
from ds_runtime.cli import main
from ds_runtime.config import EngineConfig
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError, EngineDeadError
from ds_runtime.parallel.placement import check_experts
from ds_runtime_kit.models.tiny import write_tiny_fp8

LAYOUTS = {
    "ep 2": {"tp": 2, "ep": 2},
    "ep 2 of 4": {"tp": 4, "ep": 2},
    "ep 2, groups": {"tp": 2, "ep": 2, "enable_dp_attention": True},
    "ep 4": {"tp": 4, "ep": 4},
    "ep 4, groups": {"tp": 4, "ep": 4, "enable_dp_attention": True},
    "ep 4, groups of two": {"tp": 4, "dp": 2, "ep": 4, "enable_dp_attention": True},
    "ep 2, four groups": {"tp": 4, "ep": 2, "enable_dp_attention": True},
}
FUSED = {"fusion": ("shared_experts=on",)}
LAYOUTS |= {
    f"{name}, shared ones beside": {**LAYOUTS[name], **FUSED}
    for name in ("ep 2", "ep 2 of 4", "ep 2, groups", "ep 4, groups of two")
}
SHORT = ("ep 2", "ep 2, groups, shared ones beside")


@pytest.fixture(scope="module")
def alone(tiny):
    with LLM(tiny, **SETTINGS) as llm:
        return ask(llm)


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_mixed_batches_give_what_one_rank_gives(tiny, alone, name):
    layout = LAYOUTS[name]
    with LLM(tiny, **SETTINGS, **layout) as llm:
        same(ask(llm), alone)
        sites = {s.op: s for s, _ in llm._assembly.binding.choices}
        assert sites["experts"].shape == (
            8 // layout["ep"] + ("fusion" in layout),
            32 * layout["ep"] // layout["tp"],
            64,
        )


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 4, "ep": 3}, "--ep 3: ranks of --tp hold parts .* --tp 4 does not divide into 3"),
        ({"ep": 2}, "--ep 2: .* --tp 1 does not divide into 2: give a divisor of 1, or --tp 2"),
        (
            {"tp": 3, "ep": 3, "enable_dp_attention": True},
            "--ep 3: the 8 routed experts of this model do not divide into 3 parts: give a divisor",
        ),
        ({"tp": 2, "ep": -1}, "--ep -1: must be at least 0"),
    ],
)
def test_parts_that_cannot_be_are_a_sentence_before_anything_starts(tiny, layout, said):
    with pytest.raises(ConfigError, match=said):
        LLM(tiny, **SETTINGS, **layout)


def test_a_model_without_experts_has_none_to_divide(tiny):
    dense = replace(load_config(tiny), experts=0)
    with pytest.raises(ConfigError, match="--ep 2: this model has no routed experts: leave it out"):
        check_experts(dense, EngineConfig(tp=2, ep=2))
    check_experts(dense, EngineConfig(tp=2))


@pytest.mark.parametrize("flags", [("--ep", "3"), ("--ep-size", "8")])
def test_a_server_that_cannot_start_is_gone_with_a_sentence(tiny, flags):
    words = ["serve", "--model", str(tiny), "--platform", "cpu", "--tp", "4", "--port", "0"]
    command = [sys.executable, "-m", "ds_runtime", *words, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        text = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 1
    lines = [line for line in text.splitlines() if "--ep" in line]
    assert len(lines) == 1 and "Traceback" not in text
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tiny) in (p.info["cmdline"] or ())
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ("--ep", "2"),
        ("--ep-size", "2"),
        ("--expert-parallel-size", "2"),
        ("--enable-ep-moe",),
        ("--enable-expert-parallel",),
        ("--ep", "0"),
    ],
)
def test_plan_says_what_each_rank_holds(tiny, capsys, flags):
    words = ["plan", "--model", str(tiny), "--device", "h200", "--tp", "2"]
    assert main(words) == 0
    whole = capsys.readouterr().out
    assert main([*words, *flags]) == 0
    divided = capsys.readouterr().out
    assert "experts by number in 2 parts" in divided and "group ep: 0 1" in divided
    assert "experts by number" not in whole and "group ep" not in whole
    weights = [re.search(r"weights ([\d.]+) (\w+)", said).groups() for said in (whole, divided)]
    assert weights[0] == weights[1], "half the experts, or half of each"


def test_a_dead_rank_ends_all(tiny):
    llm = LLM(tiny, **SETTINGS, tp=2, ep=2, enable_dp_attention=True)
    pids = llm.pids
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    psutil.Process(pids[0]).kill()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 was ended by SIGKILL"):
        list(stream)
    llm.close()
    assert time.monotonic() - start < 30 and not any(map(psutil.pid_exists, pids))


CODED = ("experts=reference.Fp8W8A8Experts",)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    write_tiny_fp8(folder, "v3", hidden_size=256, moe_intermediate_size=128)
    return folder


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_that_cross_as_codes_change_no_bit(fp8, ranks, monkeypatch):
    """Experts quantise rows with the same scales, here or there."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("plugins")))
    import uncoded

    settings = {**SETTINGS, "dtype": "bfloat16", "disable_graph": True}
    settings |= {"tp": ranks, "ep": ranks, "enable_dp_attention": True}
    prompts = [[7, 8, 9] * 9, [5], [11, 12] * 20]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    found, crossed = [], []
    for pin in (CODED, ("experts=uncoded.Uncoded",)):
        with LLM(fp8, **settings, pin=pin, extra_plugins=[uncoded]) as llm:
            outputs = llm.generate(prompts, params)
            found.append([(o.token_ids, o.logprobs) for o in outputs])
            crossed.append(llm.stats().wire_bytes)
    assert found[0] == found[1]
    assert 0 < crossed[0] < crossed[1]
    del sys.modules["uncoded"]


def test_plan_says_what_rows_cross_as(fp8, capsys):
    words = ["plan", "--model", str(fp8), "--platform", "cpu", "--tp", "2", "--ep", "2"]
    for pin, said in (
        ((), "cross as bfloat16: their kernels do not say that they take codes"),
        (("--pin", CODED[0], "--disable-graph"), "cross as FP8 codes, one scale per 128"),
    ):
        assert main([*words, "--enable-dp-attention", "--dtype", "bfloat16", *pin]) == 0
        assert said in capsys.readouterr().out
    assert main(words) == 0
    assert "cross as" not in capsys.readouterr().out


def test_a_token_s_shared_experts_are_in_one_part(tiny):
    """As --enforce-shared-experts-fusion has it: their slots are as wide as those of routed ones,
    whatever the number of parts, and captured steps have the bits of steps op by op."""
    layout = {"tp": 2, "ep": 2, "enable_dp_attention": True, **FUSED}
    params = SamplingParams(max_tokens=60, logprobs=2, ignore_eos=True)
    found = []
    for disable_graph in (True, False):
        with LLM(tiny, **SETTINGS, **layout, disable_graph=disable_graph) as llm:
            outputs = llm.generate([[5, 6, 7], [9] * 20, [8]], params)
            found.append([(o.token_ids, o.logprobs) for o in outputs])
    assert found[0] == found[1]
