"""Flags of other engines: what they set, what the start says, and what is refused."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from dataclasses import fields
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_runtime.cli import build_parser, main, torchrun
from ds_runtime.cli.config_file import read
from ds_runtime.cli.flags import build
from ds_runtime.cli.known import KNOWN, settle
from ds_runtime.cli.run.serve import configs
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.fields import flag_of
from ds_runtime.config.spelling import Known, Spelling, add_spellings, engines, refused
from ds_runtime.errors import ConfigError
from ds_runtime.ops.binding.backends import backend_pins
from ds_runtime.ops.contract import Kernel
from ds_runtime.ops.table import OPS
from ds_runtime.parallel.mesh import Mesh
from examples import examples


@cache
def parser():
    """Made once: parsing leaves it as it is."""
    return build_parser()[0]


def parsed(*args):
    """(engine, server, notes) of a command line of `serve`."""
    namespace = parser().parse_args(["serve", *args])
    notes = settle(namespace)
    engine, server, _ = configs(namespace)
    return engine, server, notes


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        ("--model-path x", "model", "x"),
        ("x", "model", "x"),
        ("--tp-size 4", "tp", 4),
        ("--tensor-parallel-size=4", "tp", 4),
        ("--tensor_parallel_size 4", "tp", 4),
        ("--disable_radix_cache", "disable_radix_cache", True),
        ("--graph_sizes 1 2 4", "graph_sizes", (1, 2, 4)),
        ("--graph-sizes 1,2 4", "graph_sizes", (1, 2, 4)),
        ("--graph-sizes 1 --graph-sizes 3", "graph_sizes", (1, 3)),
        ("--plugins cpu cuda", "plugins", ("cpu", "cuda")),
        ("--chunked-prefill-size -1", "chunked_prefill_size", 1 << 30),
        ("--no-enable-chunked-prefill", "chunked_prefill_size", 1 << 30),
        ("--moe-backend x", "moe_runner_backend", "x"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype", "fp8"),
        ("--dtype half", "dtype", "float16"),
        ("--load-format safetensors", "load_format", "auto"),
        ("--schedule-policy priority", "policy", "priority"),
        ("--schedule-policy fcfs", "policy", "fifo"),
        ("--no-async-scheduling", "disable_overlap_schedule", True),
        ("--kv-cache-memory-bytes 1000000000", "kv_memory", 1000000000),
        ("--max-model-len 4096", "context_length", 4096),
        ("--max-prefill-tokens 4096", "max_step_tokens", 4096),
        ("--gpu-memory-utilization 0.8", "memory_utilization", 0.8),
        ("--no-enable-prefix-caching", "disable_radix_cache", True),
        ("--enforce-eager", "disable_graph", True),
        ("--fusion a=on,b=off --fusion c=on", "fusion", ("a=on", "b=off", "c=on")),
        ("--disable-shared-experts-fusion", "fusion", ("shared_experts=off",)),
        ("--enforce-shared-experts-fusion", "fusion", ("shared_experts=on",)),
        ("--speculative-algo EAGLE", "speculative_algorithm", "EAGLE"),
        ("--speculative-algorithm deepseek_mtp", "speculative_algorithm", "NEXTN"),
        ("--lora-paths a=/a b=/b", "lora", ("a=/a", "b=/b")),
        ("--tp 8 --dp 8 --enable-dp-attention", "enable_dp_attention", True),
        ("--tp 8 --dp 8 --enable-dp-attention", "attn_dp", 8),
        ("--tp 8 --dp 2 --enable-dp-attention", "attn_dp", 2),
        ("--tp 8 --dp 1 --enable-dp-attention", "attn_dp", 1),
        ("--tp 8 --enable-dp-attention", "attn_dp", 8),
        ("--tp 8 --attn-dp-size 4", "attn_dp", 4),
        ("--tp 8 --attn-dp-size 4 --dp 4", "attn_dp", 4),
        ("--tp 8 --attention-data-parallel-size=8", "enable_dp_attention", True),
        ("--tp 8 --attn-dp-size 1", "enable_dp_attention", False),
        ("--dsa-prefill-backend x", "nsa_prefill_backend", "x"),
        ("--dsa-topk-backend x", "nsa_topk_backend", "x"),
        ("--tp 8 --enable-dp-attention --enable-dp-lm-head", "attn_dp", 8),
        ("--data-parallel-size 8 --enable-expert-parallel", "tp", 8),
        ("--data-parallel-size 8 --enable-expert-parallel", "attn_dp", 8),
        ("--data-parallel-size 4 --tp 2 --enable-expert-parallel", "tp", 8),
        ("--data-parallel-size 4 --tp 2 --enable-expert-parallel", "attn_dp", 4),
        ("--data-parallel-size 8 --enable-expert-parallel", "enable_dp_attention", True),
    ],
)
def test_what_a_flag_sets(args, name, value):
    engine = parsed(*args.split())[0]
    assert getattr(engine, name) == value
    assert engine.replicas == 1


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        ("--tool-call-parser deepseek_v32", "tool_call_parser", "deepseekv32"),
        ("--reasoning-parser deepseek_v4", "reasoning_parser", "deepseek-v4"),
        ("--tool-call-parser deepseek_v4", "tool_call_parser", "deepseekv4"),
        ("--reasoning-parser deepseek_v3", "reasoning_parser", "deepseek-v3"),
        ("--disable-log-requests", "access_log", False),
        ("--disable-uvicorn-access-log", "access_log", False),
    ],
)
def test_what_a_flag_of_the_server_sets(args, name, value):
    assert getattr(parsed(*args.split())[1], name) == value


def test_the_number_of_replicas_and_of_groups_is_one_flag():
    assert parsed("--dp-size", "2")[0].replicas == 2
    assert parsed("--tp", "2", "--dp", "2")[0].attn_dp == 1
    assert EngineConfig().replicas == 1
    said = parsed("--tp", "4", "--enable-dp-attention")[2]
    assert said == ["--enable-dp-attention: is --dp 4 where --dp is left out"]
    said = parsed("--tp", "4", "--dp", "1", "--enable-dp-attention")[2]
    assert said == ["--dp 1: one group of ranks divides attention by heads alone"]
    assert parsed("--tp", "4", "--dp", "2", "--enable-dp-attention")[2] == []
    assert Mesh.of(parsed(*["--tp", "8", "--dp", "2", "--enable-dp-attention"])[0]).attn_tp == 4


def test_several_machines_and_torchrun(tmp_path):
    line = "--tp 4 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:5000 --headless"
    with pytest.raises(
        ConfigError, match=r"^--dist-init-addr 10.0.0.1:5000: other machines .*give"
    ):
        parsed(*line.split())
    for host in ("127.0.0.1", "localhost", "127.1.2.3"):
        engine, _, notes = parsed(*line.replace("10.0.0.1", host).split())
        assert (Mesh.of(engine).per_host, engine.node_rank, len(notes)) == (2, 1, 2)
        assert "without --dist-token-file, whoever is on this machine may join" in notes[1]
    assert len(parsed(*line.split(), "--dist-token-file", "x")[2]) == 1
    with pytest.raises(ConfigError, match="below 65535, because the next one is used, too"):
        parsed(*line.replace("5000", "65535").split())
    told = parsed("--dist-init-addr", "h:1")[2]
    assert told == ["--dist-init-addr h:1: not needed: ranks of one machine find each other"]
    given = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    given |= {"LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    asked = {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    said = Namespace(node_rank=0)
    assert torchrun.settle(said, asked) == [
        "torchrun: is --tp 8 --nnodes 2 --dist-init-addr h:10 here"
    ]
    assert vars(said) == {"node_rank": 0, "tp": 8, "nnodes": 2, "dist_init_addr": "h:10"}
    assert asked == given and not torchrun.is_spare(given)
    assert torchrun.is_spare({**given, "LOCAL_RANK": "3"})
    alone = Namespace()
    assert torchrun.settle(alone, {**given, "GROUP_WORLD_SIZE": "1"}) == [
        "torchrun: is --tp 8 here"
    ]
    assert torchrun.settle(Namespace(), {"RANK": "0", "WORLD_SIZE": "8"}) == []
    for flag in ("tp", "tensor-parallel-size"):  # what a file says is said
        (tmp_path / "c.yaml").write_text(f"{flag}: 16\nnnodes: 2\n")
        filed = parser().parse_args(["serve", "--config", str(tmp_path / "c.yaml")])
        assert torchrun.settle(filed, given) == [
            "torchrun: is --node-rank 1 --dist-init-addr h:10 here"
        ]
        engine, _ = build(EngineConfig, filed)
        assert (engine.tp, engine.nnodes, engine.node_rank) == (16, 2, 1)
    assert not torchrun.is_spare({"LOCAL_RANK": "1"})


@pytest.mark.parametrize("flag", [f for f, meant in KNOWN.items() if isinstance(meant, Spelling)])
def test_every_spelling_says_so_or_ends_the_start(flag):
    meant = KNOWN[flag]
    number = meant.takes == "numbers" or "memory" in flag or "max" in flag
    words = [] if meant.takes == "none" else ["1" if number else "x=/x"]
    if "enable_dp_attention" in meant.sets:
        words = ["2", "--tp", "2"]
    if meant.refused:
        with pytest.raises(ConfigError, match=flag):
            parsed(flag, *words)
    else:
        _, _, notes = parsed(flag, *words)
        assert [note for note in notes if note.startswith(flag) and meant.says in note]
    assert not meant.says.endswith(".") and "\n" not in meant.says


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            "--tp 4 --nnodes 3 --dist-init-addr a:1",
            "--tp 4 ranks do not divide among 3 machines: give",
        ),
        ("--tp 4 --nnodes 2", "--dist-init-addr is missing: with --nnodes 2 it is HOST:PORT"),
        ("--tp 4 --nnodes 2 --dist-init-addr here", "--dist-init-addr here: with --nnodes 2 it is"),
        ("--tp 4 --nnodes 2 --master-addr h:70000", "--dist-init-addr h:70000: with --nnodes 2"),
        (
            "--tp 4 --nnodes 2 --dist-init-addr h:1 --node-rank 2",
            "--node-rank 2: machines are numb",
        ),
        ("--tp 4 --nnodes 0", "--nnodes 0: must be at least 1"),
        ("--tp 4 --dp 2 --nnodes 2 --dist-init-addr h:1", "--dp 2: replicas run on one machine"),
        ("--master-port 5000", "--master-port 5000: is part of --dist-init-addr HOST:PORT here"),
        ("--pp-size 2", "--pp-size 2: stages of layers are not built yet"),
        ("--dp 8 --enable-dp-attention", "--tp 1 does not divide into 8: give --tp 8, or leave"),
        ("--tp 8 --dp 3 --enable-dp-attention", "--tp 8 does not divide into 3: give --tp 3"),
        ("--tp 8 --dp 0 --enable-dp-attention", "--dp 0: must be at least 1"),
        ("--tp 8 --dp -8 --enable-dp-attention", "--dp -8: must be at least 1"),
        ("--tp 0 --dp 8 --enable-dp-attention", "--tp 0: must be at least 1"),
        ("x --model y", "x: --model y names another model: give one of them"),
        ("--disaggregation-mode prefill", "are not built yet"),
        ("--speculative-config {}", "is --speculative-algorithm NEXTN --speculative-num-steps N"),
        ("--kv-transfer-config {}", "are not built yet: leave it out"),
        ("--decode-context-parallel-size 2", "are not built yet: leave it out"),
        (
            "--tp 8 --dp 2 --attn-dp-size 4",
            "--attn-dp-size 4: --dp 2 says another number of groups",
        ),
        (
            "--tp 8 --attn-dp-size 4 --dp 2",
            "--attn-dp-size 4: --dp 2 says another number of groups",
        ),
        ("--tp 8 --attn-dp-size 2 --no-enable-dp-attention", "--attn-dp-size 2: not with --no-ena"),
        ("--tp 8 --no-enable-dp-attention --attn-dp-size 2", "--attn-dp-size 2: not with --no-ena"),
        ("--speculative-accept-threshold-acc 0.9", "drafts change no token: leave it out"),
        ("--fp8-gemm-backend triton", "is --pin linear=KERNEL here"),
        ("--linear-backend marlin", "is --pin linear=KERNEL here"),
        ("--dp 4 --data-parallel-hybrid-lb", "replicas run on one machine: start a server on each"),
        ("--radix-eviction-policy lfu", "no other order is built yet: leave it out"),
        ("--scheduling-policy priority", "the highest number comes first: turn the numbers round"),
        ("--quantization fp8", "give --quantize, which rounds while loading"),
        ("--revision main", "is for hf download: --model takes the folder"),
        ("--gpu-memory-utilization 1.5", "--memory-utilization 1.5: must be above 0"),
        ("--gpu-memory-utilization 0.5 --kv-memory 1GB", "leave it out, or --kv-memory"),
    ],
)
def test_what_is_refused(args, said):
    with pytest.raises(ConfigError) as refusal:
        parsed(*args.split())
    assert said in str(refusal.value)


@pytest.mark.parametrize("flag", ["--enable-ep-moe", "--enable-expert-parallel"])
def test_how_many_parts_of_the_experts(flag, tmp_path):
    """As many as --tp, unless a number is said, in front of the flag or behind it."""
    for number in ("--ep", "--ep-size", "--expert-parallel-size"):
        for words in ((flag, number, "2"), (number, "2", flag), (f"{number}=2", flag, flag)):
            engine, _, notes = parsed("--tp", "4", *words)
            assert engine.expert_parts == Mesh.of(engine).ep == 2, words
            assert any("unless --ep says how many" in note for note in notes)
    assert parsed("--tp", "4", "--ep", "1", flag)[0].expert_parts == 1
    file = tmp_path / "c.yaml"
    file.write_text(f"{flag[2:]}: true\n")
    for words in ((flag,), ("--config", str(file)), ("--config", str(file), flag)):
        assert parsed("--tp", "4", *words)[0].expert_parts == 4
    for words in (("--config", str(file), "--ep", "2"), ("--ep", "2", "--config", str(file))):
        assert parsed("--tp", "4", *words)[0].expert_parts == 2


@given(at=st.text(alphabet="ab1:[]. \t/@%\u0663-", max_size=12))
@example(at="--")
@example(at="a..b:5000")
@example(at=".a:5000")
@example(at="a.:5000")
@example(at="127.0.0.1.:5000")
@example(at="-a:5000")
@example(at="a.-b:5000")
@example(at=f"{'a' * 63}.b:5000")
@example(at=f"b.{'a' * 64}:5000")
@example(at="[::1]:5000")
@example(at="::1:5000")
@example(at="a b:5000")
@example(at="h:\u0663")
@example(at="tcp://h:5000")
@settings(max_examples=examples(60), deadline=None)
def test_ranks_meet_at_a_name_or_an_ipv4_number(at):
    """Nothing else comes as far as the socket that listens there, or torch."""
    words = [
        "--tp",
        "4",
        "--nnodes",
        "2",
        "--headless",
        "--node-rank",
        "1",
        f"--dist-init-addr={at}",
    ]
    host, _, port = at.rpartition(":")
    fits = port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65535
    labels = host.split(".")
    named = all(0 < len(one) < 64 and one[0] != "-" and not {*one} - {*"ab1-"} for one in labels)
    if fits and named:
        parsed(*words, "--dist-token-file", "x")
    else:
        with pytest.raises(ConfigError, match=r"a name or IPv4 number .*Ranks do not use IPv6"):
            parsed(*words)


def test_one_is_the_number_of_what_is_not_built():
    assert parsed("--pp-size", "1", "--nnodes", "1", "--disaggregation-mode", "null")[2] == []


def test_the_command_prints_the_lines(capsys):
    assert main(["serve", "/no/such", "--trust-remote-code"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "ds-runtime: --trust-remote-code: not needed: no remote code is run"
    assert said[1].startswith("ds-runtime: --model /no/such: no such folder")


def test_variables_that_others_read_are_named(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    monkeypatch.setenv("SGL_ENABLE_JIT_DEEPGEMM", "0")
    assert main(["serve", "/no/such"]) == 1
    said = capsys.readouterr().err
    assert "ds-runtime: SGLANG_ANYTHING is set and not read: ds-runtime has flags" in said
    assert "SGL_ENABLE_JIT_DEEPGEMM is set and not read: DeepGEMM is used where" in said


def test_a_file_may_have_them_too(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "tp_size: 4\ntrust-remote-code: true\nenforce-eager: true\nmax-prefill-tokens: 64\n"
        "enable-metrics: false\ndp: 4\nenable-dp-attention: true\n"
    )
    engine, _, notes = parsed("--config", str(file))
    assert (engine.tp, engine.disable_graph, engine.max_step_tokens) == (4, True, 64)
    assert (engine.attn_dp, engine.replicas) == (4, 1)
    assert [note.partition(":")[0] for note in notes] == [
        "--trust-remote-code",
        "--enforce-eager",
        "--max-prefill-tokens 64",
    ]
    file.write_text("a: 1\npp-size: 2\n".replace("a: 1\n", "\n"))
    with pytest.raises(ConfigError, match=r"c\.yaml, line 2: --pp-size 2: stages"):
        parsed("--config", str(file))


@cache
def serve_parser():
    return next(engines(parser()))


# Of every kind of flag, what is wrong with a value, whatever the flag.
BAD = {
    "none": ["'no'", "0", "null", "[true]", "{a: 1}"],
    "one": ["true", "false", "[]", "[a, b]", "{a: 1}"],
    "many": ["true", "[true]", "{a: 1}", "[{a: 1}]", "[[a]]"],
}


SPELLED = {flag: meant for flag, meant in KNOWN.items() if isinstance(meant, Spelling)}
USED = {
    flag: meant
    for flag, meant in SPELLED.items()
    if meant.takes == "none" or (not meant.refused and (meant.sets or meant.values))
}


@pytest.mark.parametrize("flag", [flag for flag in SPELLED if flag not in USED])
def test_a_value_of_no_use_may_be_anything_in_a_file(flag, tmp_path):
    """It is what the other engine takes, such as a mapping: the flag's sentence is said."""
    file = tmp_path / "c.yaml"
    for text in ("{mode: 3}", "[a, b]", "a"):
        file.write_text(f"{flag[2:]}: {text}\n")
        if KNOWN[flag].refused and text not in KNOWN[flag].values:
            with pytest.raises(ConfigError, match=re.escape(KNOWN[flag].says)):
                read(str(file), serve_parser())
        else:
            read(str(file), serve_parser())


@pytest.mark.parametrize("flag", USED)
def test_a_bad_value_in_a_file_names_its_line(flag, tmp_path):
    file = tmp_path / "c.yaml"
    for text in BAD[KNOWN[flag].takes]:
        file.write_text(f"\n{flag[2:]}: {text}\n")
        with pytest.raises(ConfigError, match=rf"c\.yaml, line 2: {flag[2:]}: .*must be"):
            read(str(file), serve_parser())


@pytest.mark.parametrize(
    ("flag", "name"), [(f, name) for f, m in KNOWN.items() for name in getattr(m, "sets", ())]
)
def test_what_a_file_sets_under_two_names_is_an_error(flag, name, tmp_path):
    file = tmp_path / "c.yaml"
    one = "2" if "1" in KNOWN[flag].values else "1"
    meant = {"none": "true", "one": one, "many": "[a=/a]"}[KNOWN[flag].takes]
    own = {"memory_utilization": "0.9", "max_step_tokens": "9", "ep": "2", "policy": "fifo"}
    own |= {"dp": "4", "chunked_prefill_size": "9", "max_queued_requests": "9"}
    own = own.get(name) or ("[a=on]" if name in ("lora", "fusion") else "true")
    first, second = f"{flag[2:]}: {meant}", f"{name}: {own}"
    for rows in ((first, second), (second, first)):
        file.write_text("\n".join(rows))
        with pytest.raises(ConfigError, match=r"line 2: .* is set in line 1 already"):
            read(str(file), serve_parser())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu-memory-utilization: 1.5", "line 1: --memory-utilization 1.5: must be above 0"),
        ("gpu-memory-utilization: much", "line 1: gpu-memory-utilization: 'much': is not a number"),
        ("max-prefill-tokens: 0", "line 1: --max-step-tokens 0: must be at least 1"),
    ],
)
def test_what_a_file_sets_by_another_name_is_checked(text, said, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        parsed("--config", str(file))
    assert said in str(refusal.value)


def test_a_file_says_no_as_the_command_line_does(tmp_path):
    file = tmp_path / "c.yaml"
    for text in ("no-enable-prefix-caching: true", "enable-prefix-caching: false"):
        file.write_text(text)
        assert parsed("--config", str(file))[0].disable_radix_cache
    for text in ("no-enable-prefix-caching: false", "enable-prefix-caching: true"):
        file.write_text(text)
        assert not parsed("--config", str(file))[0].disable_radix_cache
    file.write_text("disaggregation-mode: null")
    assert parsed("--config", str(file))[2] == []


def test_the_flag_that_was_given_is_named(capsys):
    assert main(["serve", "--max-prefill-tokens", "x"]) == 2
    assert "argument --max-prefill-tokens: 'x' is not a whole number" in capsys.readouterr().err


def test_another_name_of_platform_hides_no_line(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    assert main(["serve", "/no/such", "--device", "cpu"]) == 1
    assert "SGLANG_ANYTHING is set and not read" in capsys.readouterr().err


def test_a_name_that_is_taken_or_of_no_field_is_a_fault_of_the_plugin():
    parser, _ = build_parser()
    one = next(engines(parser))
    for flags, said in (
        ({"--tp": "threads"}, "'--tp': is taken"),
        ({"--x": "no_field"}, "no configuration has that field"),
        ({"--x": Spelling(sets={"no_field": "1"})}, "no configuration has that field"),
        ({"-x": "tp"}, "two dashes"),
    ):
        with pytest.raises(ConfigError, match=said):
            add_spellings([one], flags)


def test_the_rest_of_the_commands_know_them_where_they_have_the_field():
    parser, _ = build_parser()
    namespace = parser.parse_args(["plan", "--tp-size", "2", "--device", "h200", "--dp", "1"][:5])
    assert build(EngineConfig, namespace)[0].tp == 2 and namespace.device == "h200"


def of_verb(parser, verb):
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[
        verb
    ]


def words_of(action):
    """What its flag may take, as its own table says."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [str([*action.choices][-1])]
    for text in ("3", "0.5", "1GB", "x=y"):
        try:
            return [text] if action.type is None or action.type(text) is not None else []
        except (ValueError, argparse.ArgumentTypeError):
            continue
    raise AssertionError(f"nothing fits {action.option_strings}")


def test_plan_takes_the_server_s_command_line():
    """Flag by flag; `--device` alone means another thing there."""
    parser, _ = build_parser()
    served = [
        (flag, a)
        for a in of_verb(parser, "serve")._actions
        for flag in a.option_strings
        if flag not in ("-h", "--help", "--help-all", "--config", "--device")
    ]
    names = {f.name for c in (EngineConfig, ServerConfig) for f in fields(c)}
    seen = set()
    for flag, action in served:
        words = [flag, *words_of(action)]
        try:
            wanted = vars(parser.parse_args(["serve", *words]))
        except ConfigError:
            continue  # another engine's, which has a sentence
        found = vars(parser.parse_args(["plan", *words]))
        assert {name: wanted[name] for name in names & wanted.keys()} == {
            name: found[name] for name in names & found.keys()
        }, words
        seen |= names & wanted.keys()
    assert seen == names


def test_plan_hides_flags_that_decide_nothing():
    parser, _ = build_parser()
    said = argparse.ArgumentParser.format_help(of_verb(parser, "plan"))
    assert "--tp " in said
    for f in fields(ServerConfig):
        assert flag_of(f.name) not in re.findall(r"--[\w-]+", said)


@pytest.mark.parametrize("verb", ["one-batch", "speculative", "ops", "accuracy"])
def test_lists_of_a_bench_take_spaces(verb):
    parser, _ = build_parser()
    words = f"bench {verb} --graph-sizes 1 2,4 --plugins cpu triton".split()
    engine, _ = build(EngineConfig, parser.parse_args(words))
    assert (engine.graph_sizes, engine.plugins) == ((1, 2, 4), ("cpu", "triton"))


def test_values_that_name_kernels_come_from_plugins():
    ops = ("mha_prefill", "mla_decode")
    offered = [Kernel(OPS[op], f"vendor_kernels:{op}", "vendor", 20) for op in ops]
    names = {"attention_backend": {"theirs": "vendor", "old": refused("is gone: theirs is new")}}
    used = {"mha_prefill", "mla_decode"}

    def pins(wished):
        return backend_pins(EngineConfig(attention_backend=wished), offered, used, [names])

    assert {(p.op, p.kernel) for p in pins("theirs")} == {(op, "vendor") for op in used}
    names["attention_backend"]["their_mla"] = "vendor"
    assert pins("Their-MLA")[0].kernel == "vendor"
    assert pins("theirs")[0].flag == "--attention-backend 'theirs'"
    with pytest.raises(ConfigError, match="--attention-backend 'old': is gone: theirs is new"):
        pins("old")
    with pytest.raises(ConfigError, match="no such provider"):
        pins("other")


def test_the_server_has_no_flag_twice():
    """An alias never hides a flag of its own."""
    parser, _ = build_parser()
    for one in engines(parser):
        flags = [flag for action in one._actions for flag in action.option_strings]
        assert len(flags) == len(set(flags))
        assert all(a.help == argparse.SUPPRESS for a in one._actions if isinstance(a, Known))
