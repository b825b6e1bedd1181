"""A flag of another engine and its opposite: the last one counts, and sentences are true."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
from test_known_flags import parsed, serve_parser

from ds_runtime.cli.known import BATCH, KNOWN, SERVING
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.spelling import Known, Spelling
from ds_runtime.errors import ConfigError
from ds_runtime.ops.binding.backends import NAMES
from ds_runtime.plugins.manager import load_plugins

# Two flags that ask for opposite things, by the manuals of the engines that have them.
OPPOSITES = [
    ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    ("--enable-prefix-caching", "--disable-radix-cache"),
    ("--async-scheduling", "--no-async-scheduling"),
    ("--async-scheduling", "--disable-overlap-schedule"),
    ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    ("--enable-log-requests", "--no-enable-log-requests"),
    ("--enable-log-requests", "--disable-log-requests"),
    ("--log-requests", "--no-access-log"),
    ("--enforce-eager", "--no-enforce-eager"),
    ("--enable-expert-parallel", "--no-enable-expert-parallel"),
    ("--enable-expert-parallel", "--disable-expert-parallel"),
    ("--enable-prefix-caching", "--disable-prefix-caching"),
    ("--enable-chunked-prefill", "--disable-chunked-prefill"),
    ("--enable-dbo", "--disable-dbo"),
    ("--disable-custom-all-reduce", "--enable-custom-all-reduce"),
    ("--disable-uvicorn-access-log", "--enable-uvicorn-access-log"),
    ("--enable-expert-distribution-metrics", "--no-enable-expert-distribution-metrics"),
]


def set_by(*words):
    engine, server, _ = parsed(*words)
    return engine, server


@pytest.mark.parametrize(("flag", "other"), OPPOSITES)
def test_the_last_of_two_opposites_counts(flag, other, tmp_path):
    """On one command line, and where a file says the other one."""
    base, path = ("--tp", "2", "--dp", "2"), tmp_path / "c.yaml"
    assert set_by(*base, flag) != set_by(*base, other)
    for first, last in ((flag, other), (other, flag)):
        alone = parsed(*base, last)
        assert set_by(*base, first, last) == alone[:2]
        if last.removeprefix("--no-") == first[2:] or first.removeprefix("--no-") == last[2:]:
            assert parsed(*base, first, last)[2] == alone[2]
        if first != "--no-access-log":  # in a file: access-log: false
            path.write_text(f"{first[2:]}: true")
            assert set_by("--config", str(path), *base, last) == alone[:2]


def test_every_pair_of_opposites_takes_turns():
    names = {a.option_strings[0]: a for a in serve_parser()._actions if isinstance(a, Known)}
    seen = 0
    for flag, action in names.items():
        other = names.get("--no-" + flag[2:])
        if other is None or action.nargs != 0 or action.spelling.refused or other.spelling.refused:
            continue
        for first, last in ((flag, other.option_strings[0]), (other.option_strings[0], flag)):
            assert set_by("--tp", "2", first, last) == set_by("--tp", "2", last)
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("switch", ["--enable-chunked-prefill", "--no-enable-chunked-prefill"])
def test_a_size_of_chunks_that_is_said_stays(switch):
    size = ("--chunked-prefill-size", "4096")
    for words in ((switch, *size), (*size, switch)):
        assert parsed(*words)[0].chunked_prefill_size == 4096


def test_metrics_of_experts_are_turned_on():
    assert parsed("--enable-expert-distribution-metrics")[0].expert_metrics


# Flags of vLLM that are off unless they are given; its parser has each with `no-`, too.
OFF = """
enable-expert-parallel trust-remote-code enable-lora enforce-eager enable-sleep-mode enable-dbo
enable-eplb enable-auto-tool-choice enable-force-include-usage calculate-kv-scales
data-parallel-hybrid-lb data-parallel-external-lb disable-log-stats headless
"""


@pytest.mark.parametrize("name", OFF.split())
def test_what_is_off_may_be_said_to_be_off(name, tmp_path):
    path = tmp_path / "c.yaml"
    for text in (f"no-{name}: true", f"{name}: false"):
        path.write_text(text)
        assert parsed("--config", str(path)) == parsed()
    assert parsed(f"--no-{name}") == parsed()


def test_no_hint_names_the_opposite(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("no-enable-mixed-chunk: true")
    with pytest.raises(ConfigError) as refusal:
        parsed("--config", str(path))
    assert "'enable-mixed-chunk'" not in str(refusal.value)
    unknown = 0
    for flag, meant in KNOWN.items():
        if isinstance(meant, str) or meant.takes != "none" or flag.startswith("--no-"):
            continue
        try:
            parsed(f"--no-{flag[2:]}")
        except ConfigError:
            continue  # it is known, and has a sentence
        except SystemExit:
            unknown += 1
            assert f"did you mean '{flag}'" not in capsys.readouterr().err
    assert unknown > 3


def spellings():
    """(where, Spelling) of every table, values of their own included."""
    plugins = load_plugins()
    tables = [KNOWN, BATCH, SERVING, *plugins.named("FLAGS")]
    tables += [words for named in (NAMES, *plugins.named("BACKENDS")) for words in named.values()]
    for flag, meant in (item for table in tables for item in table.items()):
        if isinstance(meant, Spelling):
            yield flag, meant
            yield from ((f"{flag} {value}", own) for value, own in meant.values.items())


def test_a_start_that_goes_on_does_not_ask_to_leave_a_flag_out():
    said = {where: meant.says for where, meant in spellings() if not meant.refused}
    assert not [where for where, says in said.items() if says.endswith("leave it out")]
    assert len(said) > 300


def test_a_switch_is_set_to_a_word_that_it_has():
    """Any other word would turn it off."""
    switches = {f.name for c in (EngineConfig, ServerConfig) for f in fields(c) if f.type == "bool"}
    used = [
        (where, name, text)
        for where, meant in spellings()
        for name, text in meant.sets.items()
        if name in switches and meant.takes == "none"
    ]
    assert not [row for row in used if row[2] not in ("True", "False")]
    assert len(used) > 8


@pytest.mark.parametrize(
    ("policy", "words"), [*product(["fifo", "priority"], ["lpm", "random", "dfs-weight"])]
)
def test_another_order_leaves_the_policy(policy, words):
    engine, _, notes = parsed("--schedule-policy", words, "--policy", policy)
    assert engine.policy == policy
    assert any("--policy decides the order" in note for note in notes)
