"""Every setting of the server, its default and its help. Frozen; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ds_runtime.common.address import HOST, check_origin
from ds_runtime.config.fields import check_fields, flag_of, setting
from ds_runtime.errors import ConfigError

MOST_SECONDS = 1_000_000  # that a setting may wait: eleven days
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on", group="server")
    port: int = setting(30000, "port to listen on (0: any free one)", least=0, most=65535)
    served_model_name: str | None = setting(None, "model name in the API (default: folder name)")
    api_key: tuple[str, ...] = setting(
        (),
        "require this bearer token on every route but /health, /ping, /metrics and the dashboard's "
        "files. It may be repeated. No key reveals the prompts of another",
        repeatable=True,
        empty=True,  # `check_key` says more
    )
    api_key_file: str | None = setting(
        None, "file of more keys, one a line: those on the command line are seen by all processes"
    )
    admin_api_key: str | None = setting(
        None, "only this key may flush the cache, profile, and load adapters", empty=True
    )
    ssl_certfile: str | None = setting(None, "PEM file with the certificate: serve HTTPS")
    ssl_keyfile: str | None = setting(None, "PEM file with the certificate's key")
    ssl_keyfile_password: str | None = setting(None, "password of --ssl-keyfile", empty=True)
    cors_origins: tuple[str, ...] = setting(
        (), "web origins whose pages may call the API, or '*' for all (comma separated)"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which clients reach this server, like api.example.com or *.example.com (comma "
        "separated; default: any, but on loopback without a key only localhost and addresses)",
    )
    client_timeout: float = setting(
        60.0,
        "seconds for a request's head, and that a client may take in nothing",
        above=0,
        most=MOST_SECONDS,
    )
    max_body: int | None = setting(
        None,
        "largest request body, e.g. 16MB (default: 16 bytes for each token of the context, and 1 "
        "MiB)",
        size=True,
        least=1,
    )
    clamp_max_tokens: bool = setting(
        False,
        "where a request's limit of tokens is above what the context has left, make that the limit "
        "instead of refusing it (/v1/messages always does)",
    )
    on_engine_death: str = setting(
        "restart",
        "when an engine process dies or hangs: restart it, or end the server",
        choices=("restart", "exit"),
    )
    max_engine_restarts: int = setting(
        3, "restarts before the server exits; ten minutes of serving forget them", least=0
    )
    watchdog_timeout: float = setting(
        300.0,
        "seconds without a sign after which an engine with work hangs (0: wait for ever)",
        least=0,
        most=MOST_SECONDS,
    )
    shutdown_timeout: float = setting(
        20.0,
        "seconds that running requests may take after SIGTERM or Ctrl-C; twice: none",
        least=0,
        most=MOST_SECONDS,
    )
    profile_dir: str | None = setting(
        None, "folder for the traces of /start_profile, which is refused without it"
    )
    reasoning_parser: str = setting(
        "auto",
        "who splits reasoning from the answer: deepseek-v3, deepseek-v4, deepseek-r1, glm45, none, "
        "or the model's",
        also={f"deepseek_{name}": f"deepseek-{name}" for name in ("v3", "v4", "r1")},
    )
    tool_call_parser: str = setting(
        "auto",
        "who reads tool calls: deepseekv3, deepseekv31, deepseekv32, deepseekv4, glm45, glm47, "
        "none, or the model's",
        also={f"deepseek_{name}": f"deepseek{name}" for name in ("v3", "v31", "v32", "v4")},
    )
    strip_thinking_cache: bool = setting(
        False, "keep reasoning out of the prefix cache: later prompts leave it out anyway"
    )
    unknown_tools: str = setting(
        "keep",
        "calls of functions that the client did not offer: passed on, or dropped",
        choices=("keep", "drop"),
    )
    stream_response_default_include_usage: bool = setting(
        False,
        "end every stream with the token counts, unless the request says include_usage: false",
    )
    routes: tuple[str, ...] = setting((), "plugins whose HTTP routes are added (comma separated)")
    log_level: str = setting(
        "info", "least important lines to write", choices=LOG_LEVELS, group="observability"
    )
    log_format: str = setting("text", "lines for people, or JSON objects", choices=("text", "json"))
    access_log: bool = setting(True, "write a line for every request")
    otlp_endpoint: str | None = setting(
        None, "OpenTelemetry collector for traces, e.g. http://127.0.0.1:4318 (extra: otel)"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for key in self.api_key:
            check_key(key, "--api-key")
        if self.admin_api_key is not None:
            check_key(self.admin_api_key, "--admin-api-key")
            if self.admin_api_key in self.api_key:
                raise ConfigError("--admin-api-key: is one of --api-key, too: give another")
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{flag_of(name)}: needs --ssl-certfile, too")
        for origin in self.cors_origins:
            check_origin(origin)
        for host in self.allowed_hosts:
            if host != "*" and not HOST.fullmatch(host.removeprefix("*.")):
                raise ConfigError(
                    f"--allowed-hosts {host!r}: write a name without scheme and port, like "
                    "api.example.com, or *.example.com for all below it"
                )


def check_key(key: str, where: str) -> None:
    """ConfigError for what no header carries as it is; the key is not told."""
    if not key:
        raise ConfigError(
            f"{where}: is empty, so that everyone would have it: give a key, or leave it out"
        )
    if key != key.strip() or not key.isprintable():
        raise ConfigError(f"{where}: must be printable, on one line, without spaces around it")
