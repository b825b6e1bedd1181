"""Flags of other engines beside each other, and in a file beside the command line."""

from __future__ import annotations

from itertools import combinations, permutations, product

import pytest
from test_known_flags import parsed

from ds_runtime.config import EngineConfig
from ds_runtime.errors import ConfigError
from ds_runtime.offline.llm import LLM
from ds_runtime.parallel.mesh import Mesh

# (--tp, --dp, --attn-dp-size, --enable-dp-attention or its opposite): (replicas, groups of ranks
# that divide the sequences). All layouts that SGLang's own test of --attn-dp-size names, but for
# its replicas of divided engines, which are not built here.
PUBLISHED = {
    (2, 2, None, True): (1, 2),
    (4, 4, None, True): (1, 4),
    (4, 2, None, True): (1, 2),
    (8, 4, None, True): (1, 4),
    (2, None, 2, None): (1, 2),
    (4, None, 4, None): (1, 4),
    (4, None, 2, None): (1, 2),
    (8, None, 4, None): (1, 4),
    (2, None, None, None): (1, 1),
    (2, 2, None, None): (2, 1),
    (2, 1, None, True): (1, 1),
    (4, None, 2, True): (1, 2),
    (4, 2, None, None): (2, 1),
    (4, None, None, None): (1, 1),
    (4, 1, 2, False): None,
    (2, None, 0, None): None,
}


def said_of(dp, groups, switch):
    """Flags as (name, value); a switch has none."""
    switches = {True: [("enable-dp-attention", "")], False: [("no-enable-dp-attention", "")]}
    numbers = [("dp", dp), ("attn-dp-size", groups)]
    return [(n, str(v)) for n, v in numbers if v is not None] + switches.get(switch, [])


def layout_of(words):
    """(replicas, groups) that a command line runs as; None where it is refused."""
    try:
        engine = parsed(*words)[0]
    except ConfigError as refusal:
        assert str(refusal).startswith("--"), "the sentence names the flag"
        return None
    assert Mesh.of(engine).attn_dp == engine.attn_dp
    return engine.replicas, engine.attn_dp


def meant(tp, dp, groups, switch):
    """What the flags say, each by itself: None where two of them contradict each other."""
    if groups is None:
        return (1, dp or tp) if switch else (dp or 1, 1)
    if groups == 1 and not switch:
        return dp or 1, 1
    return None if switch is False or dp not in (None, groups) else (1, groups)


@pytest.mark.parametrize(("flags", "layout"), [*PUBLISHED.items()], ids=str)
def test_layouts_are_those_that_are_published_elsewhere(flags, layout):
    tp, *others = flags
    words = [w for name, value in said_of(*others) for w in (f"--{name}", value) if w]
    assert layout_of(("--tp", str(tp), *words)) == layout


@pytest.mark.parametrize("switch", [None, True, False])
@pytest.mark.parametrize("groups", [None, 1, 2, 8])
@pytest.mark.parametrize("dp", [None, 1, 2, 8])
def test_no_flag_of_groups_is_passed_over(dp, groups, switch, tmp_path):
    """In each order, and each in a file or on the command line. A file says a thing once."""
    flags, path = said_of(dp, groups, switch), tmp_path / "c.yaml"
    layout = meant(8, dp, groups, switch)
    for inside in (c for n in range(len(flags) + 1) for c in combinations(flags, n)):
        keys = [(n, v) if v else (n.removeprefix("no-"), str(n[0] != "n")) for n, v in inside]
        path.write_text("".join(f"{name}: {value}\n" for name, value in keys))
        for order in permutations(flag for flag in flags if flag not in inside):
            words = [w for name, value in order for w in (f"--{name}", value) if w]
            line = ("--tp", "8", "--config", str(path), *words)
            twice = len(keys) > 1 and any(name == "attn-dp-size" for name, _ in keys)
            assert layout_of(line) == (None if twice else layout), (keys, words)


@pytest.mark.parametrize(("first", "last"), [*product([1, 2, 8], repeat=2)])
@pytest.mark.parametrize("switch", [None, True])
def test_of_two_numbers_of_groups_the_last_counts_and_the_command_line_before_a_file(
    first, last, switch, tmp_path
):
    path, words = tmp_path / "c.yaml", ["--enable-dp-attention"] if switch else []
    path.write_text(f"attn-dp-size: {first}")
    for earlier in (("--attn-dp-size", str(first)), ("--config", str(path))):
        line = ("--tp", "8", *earlier, "--attention-data-parallel-size", str(last), *words)
        assert layout_of(line) == (1, last)


@pytest.mark.parametrize("switch", [None, True, False])
@pytest.mark.parametrize("dp", [None, 1, 2, 8])
def test_keywords_mean_what_flags_of_their_names_do(dp, switch):
    keywords = {"dp": dp, "enable_dp_attention": switch}
    config = EngineConfig(tp=8, **{k: v for k, v in keywords.items() if v is not None})
    assert (config.replicas, config.attn_dp) == meant(8, dp, None, switch)


@pytest.mark.parametrize("name", ["attn_dp_size", "attention_data_parallel_size", "dp_size"])
def test_flags_of_others_are_no_keywords(name):
    with pytest.raises(ConfigError, match=rf"LLM\({name}=\.\.\.\): no such setting"):
        LLM(tp=8, enable_dp_attention=True, **{name: 1})


def test_groups_that_do_not_fit_are_said_of_the_flag_that_was_given(tmp_path):
    path = tmp_path / "c.yaml"
    for tp, groups in product([1, 2, 8], [-1, 0, 3, 16]):
        path.write_text(f"attn-dp-size: {groups}")
        for words in (("--attn-dp-size", str(groups)), ("--config", str(path))):
            with pytest.raises(ConfigError) as refusal:
                parsed("--tp", str(tp), *words)
            said = str(refusal.value).removeprefix(f"--config {path}, line 1: ")
            assert said.startswith(f"--attn-dp-size {groups}: ")
            assert "--enable-dp-attention" not in said and "--dp " not in said
            assert (said != str(refusal.value)) == (words[0] == "--config")


def test_one_group_is_said_by_the_flag_that_was_given():
    for flag in ("--attn-dp-size", "--dp"):
        *_, notes = parsed("--tp", "8", flag, "1", "--enable-dp-attention")
        assert f"{flag} 1: one group of ranks divides attention by heads alone" in notes
    line = ("--tp", "1", "--dp", "2", "--attn-dp-size", "1", "--enable-expert-parallel")
    assert layout_of(line) == (2, 1), "parallel experts divide no attention of one group"


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
    flag = "--attn-dp-size" if "attn-dp-size" in (args or file) else "--dp"  # that was given
    with pytest.raises(ConfigError, match=f"{flag} 0: must be at least 1") as refusal:
        parsed(*words)
    assert (f"--config {path}, line 1: " in str(refusal.value)) == placed
