"""Settings that can only hang or break later are refused at once, with the flag's name."""

from __future__ import annotations

import pytest

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
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static nan: must be above 0"),
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
