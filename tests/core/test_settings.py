"""Settings that can only hang or break later are refused at once, with the flag's name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from ds_runtime.cli import build_parser
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.errors import ConfigError

COUNTS = (
    "tp",
    "threads",
    "context_length",
    "kv_memory",
    "page_size",
    "max_running_requests",
    "max_step_tokens",
    "chunked_prefill_size",
    "prefix_chunk",
    "max_queued_requests",
    "dist_timeout",
)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_positive(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}: must be at least"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -5])
def test_a_body_has_bytes(value):
    with pytest.raises(ConfigError, match=f"--max-body {value}: must be at least 1"):
        ServerConfig(max_body=value)
    assert ServerConfig(max_body=1).max_body == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fusion": ("qkv_a",)}, "--fusion qkv_a: write NAME=on or NAME=off"),
        ({"fusion": ("-qkv_a",)}, "--fusion -qkv_a: write NAME=on or NAME=off"),
        ({"fusion": ("qkv_a=1",)}, "--fusion qkv_a=1: write NAME=on or NAME=off"),
        ({"fusion": ("=on",)}, "--fusion =on: write NAME=on or NAME=off"),
        ({"fusion": ("qkv_a=on", "qkv_a=off")}, "--fusion qkv_a: is both on and off"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static 0: must be above 0 and at most 1"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static 1.5: must be above 0"),
        ({"mem_fraction_static": 0.9, "kv_memory": 1}, "leave it out, or --kv-memory"),
        ({"mem_fraction_static": "0.9"}, "must be of type float"),
    ],
)
def test_a_fraction_is_one_and_sizes_the_cache_alone(settings, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)
    assert EngineConfig(mem_fraction_static=1).mem_fraction_static == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssl_keyfile": "k.pem"}, "--ssl-keyfile: needs --ssl-certfile, too"),
        (
            {"cors_origins": ("example.com",)},
            "--cors-origins 'example.com': write '\\*', or scheme",
        ),
        ({"cors_origins": ("https://a.b/c",)}, "like https://chat.example.com"),
    ],
)
def test_what_browsers_and_tls_need(settings, said):
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**settings)
    assert ServerConfig(cors_origins=("*", "http://localhost:8080")).cors_origins


def test_a_context_holds_a_prompt_and_an_answer():
    with pytest.raises(ConfigError, match="--context-length 1: must be at least 2"):
        EngineConfig(context_length=1)
    assert EngineConfig(context_length=2).context_length == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plugins", "cpu"),
        ("plugins", ("cpu", 3)),
        ("tp", "2"),
        ("tp", True),
        ("threads", 1.5),
        ("model", None),
        ("disable_radix_cache", 1),
        ("kv_memory", "2GB"),
        ("graph_sizes", ("1",)),
        ("graph_sizes", (True,)),
        ("pin", ["linear=cpu"]),
    ],
)
def test_values_of_another_type_are_refused_with_the_flag(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*: must be of type"):
        EngineConfig(**{name: value})


def test_a_join_that_the_model_has_not_is_refused():
    """As any fusion that changes nothing would be silent."""
    from ds_runtime.assembly.assemble import assemble
    from ds_runtime.config import EngineConfig

    said = "--fusion index_keys=off: DeepseekV3ForCausalLM has no index keys"
    with pytest.raises(ConfigError, match=said):
        assemble(EngineConfig(model="demo", platform="cpu", fusion=("index_keys=off",)))
    assemble(EngineConfig(model="demo", platform="cpu", fusion=("index_keys=on", "qkv_a=off")))


ELSEWHERE = {
    "ssl_keyfile_password",  # a key may have an empty one
    "dist_init_addr",  # checked where there are several machines
}
TEXTS = [
    (config, f.name, ("",) if "tuple" in str(f.type) else "")
    for config in (EngineConfig, ServerConfig)
    for f in fields(config)
    if "str" in str(f.type) and f.name not in ELSEWHERE
]


@pytest.mark.parametrize(
    ("config", "name", "value"), TEXTS, ids=[f"{c.__name__}.{name}" for c, name, _ in TEXTS]
)
def test_an_empty_text_is_refused_with_the_flag(config, name, value, capsys):
    """A script's variable that is not set turns no check off, such as --plan or --allowed-hosts."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"^{flag}\\b"):
        config(**{name: value})
    serve = build_parser()[1].choices["serve"]
    try:
        found = vars(serve.parse_args([flag, ""]))[name]
    except SystemExit:
        assert flag in capsys.readouterr().err
    else:
        assert found in ("", [""])  # which the config refuses, as above


def test_a_tls_key_may_have_an_empty_password():
    tls = {"ssl_certfile": "c.pem", "ssl_keyfile": "k.pem"}
    assert ServerConfig(**tls, ssl_keyfile_password="").ssl_keyfile_password == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": 1_000_000}, "--tp 1000000: makes 1000000 ranks on one machine"),
        ({"dp": 1_000_000}, "--dp 1000000: makes 1000000 ranks"),
        ({"tp": 512, "dp": 512}, "--tp 512 --dp 512: makes 262144 ranks"),
        ({"tp": 4096, "enable_dp_attention": True}, "--tp 4096: makes 4096 ranks"),
        (
            {"tp": 4096, "nnodes": 2, "dist_init_addr": "node0:5000"},
            "--tp 4096 --nnodes 2: makes 2048 ranks",
        ),
    ],
)
def test_a_mistyped_number_of_ranks_starts_no_processes(settings, said):
    with pytest.raises(ConfigError, match=f"{said}.*give less, at most 1024 ranks"):
        EngineConfig(**settings)


def test_as_many_ranks_as_a_machine_may_have():
    assert EngineConfig(tp=1024).tp == 1024
    assert EngineConfig(tp=8, dp=128).replicas == 128
    assert EngineConfig(tp=4096, nnodes=4, dist_init_addr="node0:5000").tp == 4096
