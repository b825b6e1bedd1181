"""`--config FILE`, flags that plugins name, and the groups of the help."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from faulty import install, tiny_config

from ds_runtime.cli import build_parser, main
from ds_runtime.cli.flags import build
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.config.spelling import add_spellings, engines
from ds_runtime.errors import ConfigError

Built = tuple[EngineConfig, frozenset[str], ServerConfig, frozenset[str]]


@cache
def acme_parser() -> argparse.ArgumentParser:
    """With a flag of a plugin. Made once: parsing leaves it as it is."""
    parser, _ = build_parser()
    for one in engines(parser):
        add_spellings([one], {"--disable-acme-graph": "disable_graph"})
    return parser


def parse(*args: str, verb: str = "serve") -> Built:
    namespace = acme_parser().parse_args([verb, *args])
    return (*build(EngineConfig, namespace), *build(ServerConfig, namespace))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


EVERYTHING = """
# settings of one deployment
model: /models/v3          # a string
tp: 2
context_length: 4096       # underscores are as good
kv-memory: 2GB
dtype: bfloat16
plugins: [cpu, triton]
fusion: qkv_a=off
graph-sizes: [1, 2, 8]
pin:
  - linear=cpu
  - rope=reference
disable-acme-graph: true
strict-ops: false
port: 8000
api-key: "1234"
cors-origins: ["https://a.b"]
"""


def test_a_file_sets_every_kind_of_field(tmp_path: Path) -> None:
    engine, explicit, server, mine = parse("--config", write(tmp_path, EVERYTHING))
    assert engine == EngineConfig(
        model="/models/v3",
        tp=2,
        context_length=4096,
        kv_memory=2 * 10**9,
        dtype="bfloat16",
        plugins=("cpu", "triton"),
        fusion=("qkv_a=off",),
        graph_sizes=(1, 2, 8),
        pin=("linear=cpu", "rope=reference"),
        disable_graph=True,
        strict_ops=False,
    )
    assert "strict_ops" in explicit and "threads" not in explicit
    assert server == ServerConfig(port=8000, api_key=("1234",), cors_origins=("https://a.b",))
    assert mine == {"port", "api_key", "cors_origins"}


def test_the_command_line_wins(tmp_path: Path) -> None:
    args = ("--tp", "4", "--graph-sizes", "16", "--config", write(tmp_path, EVERYTHING))
    for order in (args, (*args[-2:], *args[:-2])):
        engine, _, server, _ = parse(*order)
        assert (engine.tp, engine.graph_sizes, server.port) == (4, (16,), 8000)


def test_other_commands_read_the_same_file(tmp_path: Path) -> None:
    path = write(tmp_path, EVERYTHING)
    engine, _, server, _ = parse("--config", path, "prompt", verb="generate")
    assert engine.tp == 2 and server == ServerConfig()
    assert parse("--config", path, verb="plan") == parse("--config", path)  # of one command line


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "# nothing\n"))[:2] == (EngineConfig(), frozenset())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "line 1: unknown key 'prot'; did you mean 'port'?"),
        ("tp: 1\nzzzzzz: 1", "line 2: unknown key 'zzzzzz': remove it"),
        ("3: 1", "line 1: unknown key 3: remove it"),
        ("tp: two", "line 1: tp: 'two': must be a whole number"),
        ("tp: 2.5", "line 1: tp: 2.5: must be a whole number"),
        ("tp: true", "line 1: tp: True: must be a whole number"),
        ("tp: [1]", "line 1: tp: [1]: must be one value, not a list"),
        ("tp:", "line 1: tp: None: must be a whole number"),
        ("\ntp: 0", "line 2: --tp 0: must be at least 1"),
        ("api-key: 1234", "line 1: api-key: 1234: must be text: put it in quotes"),
        ("mem-fraction-static: much", "mem-fraction-static: 'much': must be a number"),
        ("mem-fraction-static: 2", "line 1: --mem-fraction-static 2: must be above 0"),
        ("strict-ops: 1", "line 1: strict-ops: 1: must be true or false"),
        ("kv-memory: lots", "line 1: kv-memory: 'lots': size 'lots': write a number with"),
        ("dtype: float23", "dtype: 'float23': is not one of auto, "),
        ("dtype: float23", "did you mean 'float32'?"),
        ("graph-sizes: [1, x]", "graph-sizes: [1, 'x']: 'x': must be whole numbers"),
        ("port: 70000", "line 1: --port 70000: must be from 0 to 65535"),
        ("tp: 1\nport: 2\ntp: 3", "line 3: tp is set in line 1 already: remove one"),
        ("tp: 1\n context: 2", "is not YAML: mapping values are not allowed"),
        ("- tp", "write one 'flag: value' per line"),
        ("tp: !!python/object:os.system 1", "line 1: could not determine a constructor"),
        ("model: " + "[" * 2000, "is not YAML"),
        ("no-strict-ops: true", "unknown key 'no-strict-ops'; did you mean 'strict-ops'?"),
        ("help: true", "unknown key 'help'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--config", write(tmp_path, text))
    assert str(caught.value).startswith(f"--config {tmp_path}") and said in str(caught.value)


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "no.yaml")]) == 1
    assert "no.yaml: cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    with pytest.raises(ConfigError, match="is not UTF-8 at byte 7"):
        parse("--config", str(tmp_path / "latin.yaml"))


def test_the_line_of_a_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--tp 0: must"):
        parse("--tp", "0", "--config", write(tmp_path, "tp: 2"))


# flags of plugins


def test_a_plugin_names_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        tmp_path / "a",
        monkeypatch,
        'FLAGS = {"--disable-acme-graph": "disable_graph"}',
        "acme",
        "acme-dist",
    )
    install(tmp_path / "b", monkeypatch, 'FLAGS = {"--tp": "threads"}', "bad", "bad-dist")
    assert main(["serve", "--help-all"]) == 0
    said = capsys.readouterr()
    assert "--disable-acme-graph" in said.out
    assert "plugin bad is broken: FLAGS: flag '--tp': is taken" in said.err
    tiny = str(tiny_config(tmp_path / "tiny"))
    assert main(["plan", "--model", tiny, "--disable-acme-graph", "--plugins", "acme,cpu"]) == 0


def test_the_plugin_for_it_brings_the_flag_that_its_users_know() -> None:
    import ds_runtime_cuda

    parser, _ = build_parser()
    for one in engines(parser):
        add_spellings([one], ds_runtime_cuda.hooks.FLAGS)
    for verb in ("serve", "plan"):
        namespace = parser.parse_args([verb, "--disable-cuda-graph"])
        assert build(EngineConfig, namespace)[0].disable_graph
    parser, _ = build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--disable-cuda-graph"])


def test_help_comes_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    wished = [
        "model",
        "devices",
        "memory",
        "scheduling",
        "speculation",
        "kernels",
        "server",
        "observability",
    ]
    assert headings == ["positional arguments:", "options:", *(f"{name}:" for name in wished)]
    for config in (EngineConfig, ServerConfig):
        assert "group" in fields(config)[0].metadata


def test_backends_are_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(tiny_config(tmp_path / "tiny"))
    chosen = ["--attention-backend", "Reference", "--moe-runner-backend", "reference"]
    assert main(["plan", "--model", tiny, *chosen]) == 0
    kernels = {
        line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]
    }
    for op in ("mla_decode", "mha_prefill", "experts"):
        assert kernels[op].startswith("reference."), (op, kernels[op])
    assert main(["plan", "--model", tiny, "--attention-backend", "refrence"]) == 1
    said = capsys.readouterr().err
    assert "--attention-backend 'refrence': no such provider of mha_prefill or mla_decode" in said
    assert "did you mean 'reference'?" in said


def test_a_backend_that_is_refused_is_told_by_its_own_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, device = str(tiny_config(tmp_path / "tiny")), ("--device", "xeon-6980p")
    for model, flag in ((tiny, "--attention-backend"), ("demo-v32", "--nsa-decode-backend")):
        assert main(["plan", "--model", model, *device, flag, "FlashMLA"]) == 1
        said = capsys.readouterr().err
        assert re.match(rf"ds-runtime: {flag} 'FlashMLA': refused at layers\.0\.self_attn: ", said)
        assert said.endswith("; leave it out for the best that serves\n")


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("--nsa-prefill-backend", "triton", "; --attention-backend is for dense attention"),
        ("--nsa-decode-backend", "reference", "; --attention-backend is for dense attention"),
        ("--nsa-topk-backend", "triton", ""),
        (
            "--index-cache-dtype",
            "bfloat16",
            "; --kv-cache-dtype is for the cache of dense attention",
        ),
    ],
)
def test_backends_of_sparse_attention_mean_a_model_with_an_indexer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, instead: str
) -> None:
    tiny = str(tiny_config(tmp_path / "tiny"))
    assert main(["plan", "--model", tiny, flag, "auto"]) == 0
    capsys.readouterr()
    assert main(["plan", "--model", tiny, flag, value]) == 1
    said = f"{flag} {value!r}: DeepseekV3ForCausalLM has no indexer, its attention is dense"
    assert f"{said}: leave the flag out{instead}\n" in capsys.readouterr().err
    assert main(["plan", "--model", "demo-v32", "--platform", "cpu", flag, value]) == (
        1 if value == "triton" else 0  # no such provider on this device
    )


def test_an_empty_key_is_none_that_anybody_has_to_know():
    with pytest.raises(ConfigError, match="--api-key: is empty"):
        ServerConfig(api_key=("",))
