"""`ds-runtime bench speculative`, and the shape that it is measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_runtime.cli import main
from ds_runtime_bench.checkpoints.checkpoint import plan_tensors
from ds_runtime_bench.engine.speculative import _held_out
from ds_runtime_bench.shapes import config_of

COMMON = ["bench", "speculative", "--platform", "cpu", "--dtype", "float32", "--kv-memory", "8MB"]
SHORT = ["--context-length", "64", "--threads", "1", "--runs", "1", "--output-len", "9"]


def test_simulated_drafts_are_right_as_often_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        *COMMON,
        *SHORT,
        "--input-len",
        "8",
        "--batch-size",
        "1",
        "2",
        "1",
        "--steps",
        "2",
        "--json",
    ]
    argv += ["--topk", "1", "2", "--draft-tokens", "5", "9", "5"]
    assert main([*argv, "--simulate-acceptance", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["batch_size"], r["steps"], r["topk"]) for r in report["results"]] == [
        (1, 0, 1), (2, 0, 1),
        (1, 2, 1), (1, None, 1), (2, 2, 1), (2, None, 1),
        (1, 2, 2), (2, 2, 2),
    ]  # fmt: skip
    fixed = [r["length"] for r in report["results"] if r["steps"] is not None]
    assert fixed == [1, 1, 3, 3, 3, 3]
    assert report["results"][-1]["draft_tokens"] == 5
    (left_out,) = report["left_out"]
    assert left_out.startswith("--draft-tokens 9: a tree of --steps 2 and --topk 2 has 7 tokens")
    assert all(r["tokens_per_s"] > 0 for r in report["results"]) and report["simulated"] == 1


def test_what_drafts_are_rounded_to_may_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*COMMON, *SHORT, "--input-len", "8", "--batch-size", "1", "--steps", "1", "--json"]
    argv += ["--simulate-acceptance", "1", "--speculative-draft-quantize", "w4afp8"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["speculative_draft_quantize"] == "w4afp8"
    assert [r["steps"] for r in report["results"]] == [0, 1, None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--simulate-acceptance", "2"], "--simulate-acceptance 2: must be a probability"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--output-len", "1"], "--output-len 1: must be at least 2"),
        (["--topk", "0"], "--topk 0: must be at least 1"),
        (["--draft-tokens", "1"], "--draft-tokens 1: must be at least 2"),
        (["--topk", "2", "--steps", "1", "--draft-tokens", "9"], "has 3 tokens: give at most that"),
        (["--speculative-num-steps", "2"], "--speculative-num-steps 2: what is measured here: use"),
        (["--draft-tokens", "4"], "--draft-tokens 4: is of trees: give --topk 2 or more"),
        (["--steps", "64"], "--steps 64: must be at most 63"),
        (["--topk", "300", "--steps", "1"], "--topk 300: "),
        (
            ["--batch-size", "8", "--max-running-requests", "2"],
            "--batch-size 8: only --max-running-requests 2 run at once",
        ),
        (
            ["--batch-size", "300", "--steps", "1", "--context-length", "64"],
            "--batch-size 300: the checkpoint has 200 held-out prompts",
        ),
    ],
)
def test_bad_values(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, *given]) != 0
    assert said in capsys.readouterr().err


def test_v3_narrow_has_a_draft_layer_without_copies() -> None:
    planned = list(plan_tensors(config_of("v3-narrow", "fp8")))
    names = {p.name for p in planned}
    assert "model.layers.30.eh_proj.weight" in names
    assert not any("layers.30.embed" in n or "shared_head.head" in n for n in names)
    assert 20e9 < sum(p.nbytes for p in planned) < 22.5e9


def test_held_out_answers_alone_end_where_they_end(tmp_path: Path) -> None:
    """Random prompts are measured to the last token asked for, simulated or not."""
    assert _held_out(tmp_path, None) is None
    (tmp_path / "heldout.json").write_text("{}")
    assert _held_out(tmp_path, None) == tmp_path / "heldout.json"
    assert _held_out(tmp_path, 0.5) is None
