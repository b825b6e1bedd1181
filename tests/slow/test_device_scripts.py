"""The scripts that measure an accelerator run on this machine, too: they reach into the engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.parallel.group import SoloCommunicator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow
SHORT = ["--set", "kv_memory=60000000", "max_running_requests=4"]


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("device_decode.py", ["--batch", "2", "--prompts", "32"], "'batch': 2, 'step_ms'"),
        (
            "device_long.py",
            ["--batch", "2", "--short", "64", "--long", "600", "--prefill", "128"],
            "'filled': True, 'step_ms'",
        ),
        ("device_speculative.py", ["--batch", "2", "--steps", "2", "--runs", "1"], '"cycle_ms"'),
    ],
)
def test_it_measures(script, flags, said, tmp_path):
    command = [sys.executable, str(BENCHMARKS / script), str(resolve_model("demo")), *flags]
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [*command, *SHORT, "--out", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout and out.read_text().count("\n") == 1


def test_the_tiers_are_measured(tmp_path):
    script, out = BENCHMARKS / "device_tiers.py", tmp_path / "out.jsonl"
    few = ["--sessions", "6", "--held", "2", "--tokens", "100", "--more", "8", "--out", "4"]
    command = [sys.executable, str(script), str(resolve_model("demo")), *few]
    done = subprocess.run(
        [*command, "--out-file", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    assert min(record["back_ms"], record["new_ms"], record["gain"]) > 0
    assert record["prefill_graphs"] == [], "a CPU captures no steps with prompts"


WHOLE = [sys.executable, str(BENCHMARKS / "v3_whole.py"), "--ranks", "2", "--layers", "2"]
TINY = ["--models", "tiny-v3", "--prompts", "64", "--answer", "16", "--set", "kv_memory=2000000"]


def whole(*flags, returns=0):
    """What v3_whole.py prints on two ranks of this machine: its lines."""
    done = subprocess.run([*WHOLE, *flags], capture_output=True, text=True, timeout=280)
    assert done.returncode == returns, done.stdout + done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_v3_whole_measures_what_was_predicted(tmp_path):
    """Of ranks that divide heads, and of some that divide sequences and experts, with drafts."""
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    flags = ["--arms", "tp", "ep-drafts", "--batches", "1", "3", "largest", *TINY]
    predicted = whole("--predict", *flags, "--out", str(before))
    assert [line["arm"] for line in predicted] == ["tp", "ep-drafts"]
    lines = whole("--models", "tiny-v3", "--predicted", str(before), "--out", str(after))
    assert [json.loads(text) for text in after.read_text().splitlines()] == lines
    for was, line in zip(predicted, lines, strict=True):
        said, found = line["predicted"], line["measured"]
        assert was["measured"] is None and was["predicted"] == said
        assert found["kv_tokens"] == said["kv_tokens"] and found["kv_bytes"] == said["kv_bytes"]
        assert found["weights_bytes"] == pytest.approx(said["weights_bytes"], rel=0.05)
        assert len(found["memory_bytes"]) == 2 and min(found["memory_bytes"]) > 1e8
        assert found["ready_s"] > 0 and "ended" not in line
        batches = [case["batch"] for case in line["cases"]]
        assert batches[:2] == [1, 3] and len(batches) == 3 and batches[2] > 8
        for case in line["cases"]:
            figures = case["measured"]
            assert figures["batch"] == case["batch"] and figures["steps"] > 4
            assert 0 < figures["first_token_s"] <= figures["last_first_token_s"]
            each = figures["tokens_a_step"]
            assert each == 1 or (line["arm"] == "ep-drafts" and 1 <= each <= 2)
            assert figures["step_ms"] > 0 and figures["tokens_per_s"] > 0


def test_v3_whole_ends_an_arm_in_time():
    """What was not measured is null, and the status says so."""
    flags = ["--arms", "ep", "--batches", "1", *TINY]
    (line,) = whole(*flags, "--limit", "2", returns=1)
    assert line["ended"] == "after 2 s" and line["measured"] is None
    assert [case["measured"] for case in line["cases"]] == [None]


def test_v3_whole_says_what_is_not_predicted(tmp_path):
    """A file that has no line of what is asked for."""
    file = tmp_path / "predicted.jsonl"
    file.write_text(json.dumps({"model": "v3", "arm": "tp", "ranks": 4}) + "\n")
    done = subprocess.run(
        [*WHOLE, "--predicted", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "ranks [2]" in done.stderr and str(file) in done.stderr


def test_v3_whole_on_eight_devices():
    """The model's published size is 671e9 parameters, nearly all of one byte; a card holds 150 GB.
    Ranks that divide sequences have attention's weights whole, and each its own KV cache."""
    done = subprocess.run(
        [*WHOLE[:2], "--device", "h200", "--predict", "--models", "v3", "--arms", "tp", "ep"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    heads, experts = (json.loads(text) for text in done.stdout.splitlines())
    assert heads["layers"] == experts["layers"] == 61
    assert 671e9 / 8 < heads["predicted"]["weights_bytes"] < 1.08 * 671e9 / 8
    assert heads["predicted"]["weights_bytes"] < experts["predicted"]["weights_bytes"] < 110e9
    assert experts["predicted"]["kv_tokens"] > 3 * heads["predicted"]["kv_tokens"]
    for line in (heads, experts):
        assert sum(line["predicted"].values()) - line["predicted"]["kv_tokens"] <= 150e9
        assert {case["batch"] for case in line["cases"]} >= {1, 32, 128, 512}
        for case in line["cases"]:
            read, held = case["predicted"]["read_bytes"], line["predicted"]
            tokens = case["batch"] * (case["prompt"] + 128)
            assert read <= held["weights_bytes"] + held["kv_bytes"] and tokens <= held["kv_tokens"]


def test_sums_over_ranks_are_timed(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--rows", "1", "4", "--width", "64", "--replays", "2", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "device_collectives.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks have met after" in done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = [(line["rows"], line["kind"]) for line in lines]
    assert kinds == [(rows, kind) for rows in (1, 4) for kind in ("library", "gathered")]
    assert all(line["eager, us"] > 0 and line["captured, us"] > 0 for line in lines)
    assert all(line["wrong"] == 0 and line["replays"] == 2 for line in lines)


def test_lines_of_sums_come_as_they_are_measured():
    """Whoever ends the script early has what was measured, and a rank's fault is told at once."""
    flags = ["--rows", "1", "100000", "--width", "64", "--replays", "3"]
    command = [sys.executable, str(BENCHMARKS / "device_collectives.py"), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as running:
        first = json.loads(running.stdout.readline())
        assert running.poll() is None and first["rows"] == 1 and first["wrong"] == 0
        others = running.communicate(timeout=280)[0].splitlines()
    assert running.returncode == 0 and len(others) == 3
    failed = subprocess.run(
        [*command, "--width", "-1"], capture_output=True, text=True, timeout=120
    )
    assert failed.returncode == 1 and "rank " in failed.stderr and "RuntimeError" in failed.stderr


@pytest.mark.parametrize("kind", ["library", "gathered"])
@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_wrong_sum_is_counted(kind, fault):
    """Of one rank, whose sums are its own values."""
    spec = importlib.util.spec_from_file_location("sums", BENCHMARKS / "device_collectives.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    platform = SimpleNamespace(synchronize=lambda: None)
    backend = SimpleNamespace(capture=lambda run: run)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    calls = []

    def sum_up(x):
        calls.append(1)
        return x + fault * (len(calls) % 2)  # of two sums behind each other one is wrong

    given = platform, SoloCommunicator(), backend, kind, sum_up, x
    assert script.wrong(*given, 5) == (5 if fault else 0)
