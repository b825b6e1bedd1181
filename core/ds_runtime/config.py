"""Every setting of the engine and the server, its default and its help. Frozen; torch-free.

Command-line flags are generated from these fields, so this is the only place for defaults.
Plugins may wish for changes (`ds_defaults`); what the user set explicitly always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ds_runtime.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")


def _f(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Sizes in tokens unless said; memory in bytes."""

    model: str = _f("demo", "checkpoint folder, hub id, or 'demo' for the embedded model")
    platform: str = _f("auto", "platform to run on, or 'auto' for the best that works here")
    plugins: tuple[str, ...] | None = _f(None, "load only these plugins (comma separated)")
    dtype: str = _f("auto", "compute dtype", choices=DTYPES)
    tp: int = _f(1, "tensor-parallel ranks, one process each")
    threads: int | None = _f(None, "CPU threads per rank (default: cores / ranks)")
    context_length: int | None = _f(None, "longest prompt + output (default: the model's)")
    kv_memory: int | None = _f(
        None,
        "memory for the KV cache, e.g. 2GB (default: the smaller of 8 full contexts and 25 % of "
        "free memory)",
        size=True,
    )
    page_size: int = _f(16, "tokens per KV page")
    max_running: int = _f(64, "most requests that run at once")
    max_step_tokens: int = _f(2048, "most tokens that one step computes")
    prefill_chunk: int = _f(512, "most prompt tokens of one request in one step")
    prefix_chunk: int = _f(4096, "cached tokens that one prefill expansion handles at a time")
    queue_limit: int = _f(1024, "waiting requests before new ones get 503")
    policy: str = _f("fifo", "order of waiting requests", choices=("fifo", "priority"))
    prefix_cache: bool = _f(True, "reuse the KV of equal prompt beginnings")
    deterministic: bool = _f(False, "bind only kernels that give the same bits every run")
    strict_ops: bool = _f(False, "stop if a heavy op would fall to the reference")
    pin: tuple[str, ...] = _f((), "OP[@SITE-GLOB]=KERNEL: use this kernel", repeatable=True)
    plan: str | None = _f(None, "refuse to start unless the binding equals this plan file")
    chat_template: str | None = _f(None, "jinja file used instead of the checkpoint's template")
    dist_timeout: int = _f(600, "seconds that ranks wait for each other")

    def __post_init__(self) -> None:
        _typed(self)
        _positive(
            self,
            (
                "tp",
                "page_size",
                "max_running",
                "max_step_tokens",
                "prefill_chunk",
                "prefix_chunk",
                "queue_limit",
                "dist_timeout",
            ),
        )
        for name in ("context_length", "kv_memory", "threads"):
            if getattr(self, name) is not None:
                _positive(self, (name,))
        if self.context_length == 1:
            raise ConfigError(
                "--context-length 1: must be at least 2, for one token of prompt and one of output"
            )
        _choice(self)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = _f("127.0.0.1", "address to listen on")
    port: int = _f(30000, "port to listen on (0: any free one)")
    served_model_name: str | None = _f(None, "model name in the API (default: folder name)")
    api_key: str | None = _f(
        None, "require this bearer token on every route but /health and /metrics"
    )
    max_body: int = _f(16 << 20, "largest request body, e.g. 16MB", size=True)
    routes: tuple[str, ...] = _f((), "plugins whose HTTP routes are added (comma separated)")

    def __post_init__(self) -> None:
        _typed(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: a port is between 0 and 65535")
        _positive(self, ("max_body",))


_TYPES = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": tuple, "None": type(None)}


def _typed(config: Any) -> None:
    """Refuse values of another type than the field's: the offline API passes what it is given."""
    for f in fields(config):
        value = getattr(config, f.name)
        wanted = tuple(_TYPES[part] for part in str(f.type).split(" | "))
        right = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        if isinstance(value, tuple):
            right = right and all(isinstance(item, str) for item in value)
        if not right:
            raise ConfigError(f"{_flag(f.name)} {value!r}: must be of type {f.type}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positive(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{_flag(name)} {getattr(config, name)}: must be at least 1")


def _choice(config: Any) -> None:
    for f in fields(config):
        choices = f.metadata.get("choices")
        value = getattr(config, f.name)
        if choices and value not in choices:
            raise ConfigError(f"{_flag(f.name)} {value!r}: must be one of {', '.join(choices)}")


def parse_size(text: str) -> int:
    """Bytes from '512MB', '2GiB', '4g' or a plain number. MB = 10^6, MiB = M = 2^20."""
    units = {"": 1, "b": 1}
    for i, letter in enumerate("kmgt", start=1):
        units[letter] = units[letter + "ib"] = 1024**i
        units[letter + "b"] = 1000**i
    stripped = text.strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    try:
        size = int(float(number) * units[stripped[len(number) :].strip()])
        if size < 0:
            raise ValueError("negative")
        return size
    except (KeyError, ValueError, OverflowError) as e:
        raise ConfigError(f"size {text!r}: write a number with KB, MB, GB or KiB, MiB, GiB") from e


def with_changes(config: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """A copy with other values, checked again."""
    return replace(config, **values)
