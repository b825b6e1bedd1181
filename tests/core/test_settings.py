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
    "max_running",
    "max_step_tokens",
    "prefill_chunk",
    "prefix_chunk",
    "queue_limit",
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
        ("prefix_cache", 1),
        ("kv_memory", "2GB"),
        ("pin", ["linear=cpu"]),
    ],
)
def test_values_of_another_type_are_refused_with_the_flag(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*: must be of type"):
        EngineConfig(**{name: value})
