"""Flags of other engines beside each other, and in a file beside the command line."""

from __future__ import annotations

import pytest
from test_known_flags import parsed

from ds_runtime.errors import ConfigError
from ds_runtime.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("file", "args", "said"),
    [
        ("attn-dp-size: 2", "--dp 4", "--attn-dp-size 2: --dp 4 says another number of groups"),
        ("dp: 4", "--attn-dp-size 2", "--attn-dp-size 2: --dp 4 says another number of groups"),
        ("attn-dp-size: 2", "--no-enable-dp-attention", "--attn-dp-size 2: not with --no-enable-"),
        ("enable-dp-attention: false", "--attn-dp-size 2", "--attn-dp-size 2: not with --no-ena"),
        ("attn-dp-size: 2", "--dp 2", None),
        ("attn-dp-size: 2", "--attn-dp-size 4", None),
        ("attn-dp-size: 2", "--enable-dp-attention", None),
        ("enable-dp-attention: true", "--attn-dp-size 2", None),
    ],
)
def test_groups_of_a_file_and_of_the_command_line_agree(file, args, said, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(file)
    words = ("--tp", "8", "--config", str(path), *args.split())
    if said is None:
        assert Mesh.of(parsed(*words)[0]).attn_dp == int(args[-1] if args[-1].isdigit() else "2")
        return
    with pytest.raises(ConfigError) as refusal:
        parsed(*words)
    assert said in str(refusal.value)


@pytest.mark.parametrize("name", ["--schedule-policy", "--scheduling-policy"])
def test_the_usual_order_yields_to_one_that_is_said(name, tmp_path):
    """As --enable-priority-scheduling goes with it elsewhere, in either order."""
    usual, path = f"{name} fcfs", tmp_path / "c.yaml"
    assert parsed(*usual.split())[0].policy == "fifo"
    for said in ("--enable-priority-scheduling", "--policy priority", "--policy=priority"):
        for line in (f"{usual} {said}", f"{said} {usual}", f"{usual} {said} {usual}"):
            assert parsed(*line.split())[0].policy == "priority", line
    for file in (f"{name[2:]}: fcfs", "policy: fifo", "enable-priority-scheduling: false"):
        path.write_text(file)
        assert parsed("--config", str(path))[0].policy == "fifo", file
    for text, line in (("policy: priority", usual), (f"{name[2:]}: fcfs", "--policy priority")):
        path.write_text(text)
        assert parsed("--config", str(path), *line.split())[0].policy == "priority"


def test_no_attention_by_groups_is_heard_beside_parallel_experts(tmp_path):
    """Without it these flags mean ranks that divide attention by sequences."""
    path = tmp_path / "c.yaml"
    path.write_text("enable-dp-attention: false")
    base = ("--tp", "2", "--dp", "2", "--enable-expert-parallel")
    assert Mesh.of(parsed(*base)[0]).attn_dp == 2 and parsed(*base)[0].replicas == 1
    no = "--no-enable-dp-attention"
    for words in ((*base, no), (no, *base), ("--config", str(path), *base)):
        engine, _, notes = parsed(*words)
        assert (engine.tp, engine.replicas, engine.attn_dp) == (2, 2, 1), words
        assert not any("is --tp 4" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "args", "placed"),
    [
        ("attn-dp-size: 0", "", True),
        ("attn-dp-size: 2", "--attn-dp-size 0", False),
        ("dp: 2", "--dp 0", False),
        ("dp: 0", "--dp 2", None),
        ("attn-dp-size: 0", "--attn-dp-size 2", None),
    ],
)
def test_a_bad_value_is_of_whichever_comes_first(file, args, placed, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(file)
    words = ("--tp", "8", "--config", str(path), *args.split())
    if placed is None:
        assert parsed(*words)[0].dp == 2
        return
    with pytest.raises(ConfigError, match="--dp 0: must be at least 1") as refusal:
        parsed(*words)
    assert (f"--config {path}, line 1: " in str(refusal.value)) == placed
