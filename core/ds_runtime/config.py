"""Every setting of the engine and the server, its default and its help. Frozen; torch-free.

Command-line flags and the keys of `--config FILE` are these fields, so this is the only place for
defaults. Plugins may wish for changes (`ds_defaults`); what the user set explicitly always wins. To
fusions that are not to be (`disable_fusion`) theirs are added, unless the user says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ds_runtime.common.speculation import DEFAULT_STEPS, DRAFT_QUANTIZE
from ds_runtime.common.speculation import check as check_speculation
from ds_runtime.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8")
LOG_LEVELS = ("debug", "info", "warning", "error")
FORMS = ("auto", "off", "all")
_WORDS = {"bf16": "bfloat16", "half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
QUANTIZE = ("none", "int8", "int4")
MOST_REQUESTS = 1 << 16  # that run at once
MAX_ITL = 50.0  # milliseconds between tokens, of a server
PREFILL_GRAPH_TOKENS = 1024  # of the largest step with prompts that is captured unasked


def _f(default: Any, help: str, **extra: Any) -> Any:
    """A field. group: the heading in the help of this field and of those that follow. also: what
    words of other engines mean as its value."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Sizes in tokens unless said; memory in bytes."""

    model: str = _f(
        "demo", "checkpoint folder, hub id, or 'demo' for the embedded model", group="model"
    )
    load_format: str = _f(
        "auto",
        "auto reads the checkpoint's files; dummy makes random weights on the device from "
        "config.json alone, in its formats, to measure speed: answers mean nothing",
        choices=("auto", "dummy"),
    )
    chat_template: str | None = _f(None, "jinja file used instead of the checkpoint's template")
    context_length: int | None = _f(None, "longest prompt + output (default: the model's)")
    dtype: str = _f("auto", "compute dtype", choices=DTYPES, also=_WORDS)
    quantize: str = _f(
        "none",
        "round bfloat16 or FP8 weights when they are loaded: int8 per output channel, or int4 in "
        "groups of 128 with an int8 head",
        choices=QUANTIZE,
    )
    allow_nan_weights: bool = _f(
        False, "load tensors that hold NaN: what is computed from them is NaN as well"
    )
    lora: tuple[str, ...] = _f(
        (), "NAME=DIR: a PEFT adapter that requests may name as their model", repeatable=True
    )
    max_loras: int | None = _f(
        None, "adapters that fit at a time (default: as many as --lora gives; 0: none)"
    )
    max_lora_rank: int | None = _f(
        None, "largest rank of an adapter (default: the largest of --lora's, else 16)"
    )
    lora_target_modules: tuple[str, ...] | None = _f(
        None,
        "modules that adapters may change, by PEFT's names, or 'all' (comma separated; default: "
        "those of --lora's adapters, else all but the routed experts)",
    )
    platform: str = _f(
        "auto", "platform to run on, or 'auto' for the best that works here", group="devices"
    )
    plugins: tuple[str, ...] | None = _f(None, "load only these plugins (comma separated)")
    plugin_allowlist: str | None = _f(
        None, "file of the third-party plugins that may be loaded (ds-runtime plugins --lock FILE)"
    )
    allow_platform_downgrade: bool = _f(
        False, "start on another device where the plugin of one that is here is broken"
    )
    tp: int = _f(1, "tensor-parallel ranks, one process each")
    enable_dp_attention: bool = _f(
        False,
        "divide attention among the ranks of --tp by sequences instead of heads: the KV cache of a "
        "sequence lies on one rank only, and every rank has all weights of attention",
    )
    dist_timeout: int = _f(600, "seconds that ranks wait for each other")
    threads: int | None = _f(None, "CPU threads per rank (default: cores / ranks)")
    cpu_isa: str = _f("auto", "instruction set of the CPU's kernels, or 'auto' for the best here")
    kv_cache_dtype: str = _f(
        "auto",
        "dtype of the KV cache: the compute dtype (auto), or fp8 (e4m3; where attention is sparse, "
        "latents with a scale per 128 and bfloat16 keys)",
        choices=KV_DTYPES,
        also=_WORDS,
        group="memory",
    )
    index_cache_dtype: str = _f(
        "auto",
        "dtype of the index keys of sparse attention: fp8 with a scale per key, unless the compute "
        "dtype is float32 (auto), or a compute dtype",
        choices=KV_DTYPES,
    )
    kv_memory: int | None = _f(
        None,
        "memory for the KV cache, e.g. 2GB (default: what weights and steps leave of a device, in "
        "which both take nine tenths at most; on a CPU the smaller of 8 full contexts and 25 % of "
        "free memory)",
        size=True,
    )
    mem_fraction_static: float | None = _f(
        None,
        "share of the memory that is free before loading, for weights and KV cache together",
    )
    memory_utilization: float | None = _f(
        None,
        "share of the device's memory for all that the engine holds: weights, KV cache and what "
        "steps need beside them",
    )
    memory_for_speed: str = _f(
        "auto",
        "second copies of weights, in forms that decode steps read faster: all, none (off), or "
        "those that leave enough KV cache (auto)",
        choices=FORMS,
    )
    page_size: int = _f(16, "tokens per KV page")
    disable_radix_cache: bool = _f(False, "compute every prompt from its start, reusing no KV")
    max_running_requests: int = _f(
        64,
        "most requests that run at once (default: 64; on a device of its own memory 512, or as "
        "many as find room for 2,048 tokens each)",
        group="scheduling",
    )
    max_queued_requests: int = _f(4096, "waiting requests before new ones get 503")
    max_step_tokens: int = _f(2048, "most tokens that one step computes")
    chunked_prefill_size: int = _f(
        512, "most prompt tokens of one request in one step", also={"-1": 1 << 30}
    )
    max_itl: float | None = _f(
        None,
        "most milliseconds between tokens that the prompts in a step may cause, 0 for any: their "
        "chunks are sized by what steps took (default: 50 in serve; elsewhere, and with "
        "--deterministic, 0)",
    )
    prefix_chunk: int = _f(4096, "cached tokens that one prefill expansion handles at a time")
    policy: str = _f("fifo", "order of waiting requests", choices=("fifo", "priority"))
    disable_overlap_schedule: bool = _f(
        False,
        "schedule a step only once the last one's tokens are known, also where the device "
        "computes beside the host",
    )
    disable_graph: bool = _f(
        False, "run all steps op by op, also where the device can replay captured ones"
    )
    graph_sizes: tuple[int, ...] | None = _f(
        None,
        "decode steps to capture, by number of requests; a step is filled up to the next (default: "
        "1, 2, 4, 8, then ever wider apart up to --max-running-requests; on a CPU each up to 32, "
        "when it comes often)",
    )
    max_graph_size: int | None = _f(
        None, "largest decode step to capture unasked, by number of requests (default: all)"
    )
    disable_prefill_graph: bool = _f(
        False,
        "run steps with prompts op by op, also where the device can replay what lies between their "
        "attentions",
    )
    prefill_graph_sizes: tuple[int, ...] | None = _f(
        None,
        "steps with prompts to capture at start, by number of tokens; a step is filled up to the "
        "next (default: ever wider apart up to a chunk and a token of every request, at most "
        f"{PREFILL_GRAPH_TOKENS}; with --tp at start, else each when it first comes)",
    )
    speculative_algorithm: str | None = _f(
        None,
        "draft tokens with the checkpoint's MTP layer and verify them in one forward; NEXTN and "
        "EAGLE mean the same",
        choices=(None, "NEXTN", "EAGLE"),
        also={"mtp": "NEXTN", "deepseek_mtp": "NEXTN"},
        group="speculation",
    )
    speculative_num_steps: int | None = _f(
        None, f"runs of the draft layer per step (default: {DEFAULT_STEPS})"
    )
    speculative_eagle_topk: int | None = _f(
        None, "continuations drafted per token: 1 is a chain, more a tree (default: 1)"
    )
    speculative_num_draft_tokens: int | None = _f(
        None,
        "tokens verified per sequence and step, the last one drawn included (default: all drafted)",
    )
    speculative_adaptive: bool = _f(
        False,
        "draft as many tokens as pay, none if none do, from measured step times and from how many "
        "drafts were right",
    )
    speculative_draft_model_path: str | None = _f(
        None, "folder or hub id with the draft layer, where the checkpoint itself has none"
    )
    speculative_draft_quantize: str = _f(
        "auto",
        "round what the checkpoint has in 16 bits and drafts alone are made by, eh_proj and a copy "
        "of the head, to FP8; answers do not change. auto: where the device multiplies FP8. "
        "w4afp8: as auto, and the draft layer's routed experts to int4",
        choices=DRAFT_QUANTIZE,
    )
    attention_backend: str | None = _f(
        None, "provider whose kernels attention uses (default: the best)", group="kernels"
    )
    disable_mla: bool = _f(
        False,
        "keep the keys and values of all heads in the KV cache and attend these, instead of "
        "latents: for comparison, as it takes many times the memory",
    )
    enable_torch_compile: bool = _f(
        False,
        "have torch.compile make norms, activations, rotation and the choice of experts of small "
        "steps, before the port opens; on a CPU steps then run op by op",
    )
    torch_compile_max_bs: int = _f(
        32, "rows of the largest step that --enable-torch-compile is for"
    )
    nsa_prefill_backend: str = _f(
        "auto", "provider whose kernel sparse attention of prompts uses, or 'auto' for the best"
    )
    nsa_decode_backend: str = _f(
        "auto", "provider whose kernel sparse attention of decode steps uses, or 'auto'"
    )
    nsa_topk_backend: str = _f(
        "auto", "provider whose kernel chooses the tokens of sparse attention, or 'auto'"
    )
    moe_runner_backend: str | None = _f(
        None, "provider whose kernels the routed experts use (default: the best)"
    )
    pin: tuple[str, ...] = _f((), "OP[@SITE-GLOB]=KERNEL: use this kernel", repeatable=True)
    disable_fusion: tuple[str, ...] = _f(
        (),
        "fusions to leave apart (comma separated): qkv_a, index_keys, shared_experts, or an op "
        "that is composed of others; those that a plugin wishes for are added, but those that are "
        "given as -NAME and none to an empty list",
    )
    deterministic: bool = _f(False, "bind only kernels that give the same bits every run")
    strict_ops: bool = _f(
        False, "stop if a heavy op would fall to the reference, or weights would be converted"
    )
    plan: str | None = _f(None, "refuse to start unless the binding equals this plan file")

    def __post_init__(self) -> None:
        _typed(self)
        _positive(
            self,
            (
                "tp",
                "page_size",
                "max_running_requests",
                "max_step_tokens",
                "chunked_prefill_size",
                "prefix_chunk",
                "max_queued_requests",
                "dist_timeout",
                "torch_compile_max_bs",
            ),
        )
        if self.max_loras is not None and not 0 <= self.max_loras <= 1024:
            raise ConfigError(f"--max-loras {self.max_loras}: must be from 0 to 1024")
        optional = ("context_length", "kv_memory", "threads", "max_lora_rank", "max_graph_size")
        for name in optional:
            if getattr(self, name) is not None:
                _positive(self, (name,))
        if self.graph_sizes is not None and min(self.graph_sizes, default=0) < 1:
            said = ",".join(map(str, self.graph_sizes))
            raise ConfigError(
                f"--graph-sizes {said}: must be numbers of at least 1; --disable-graph captures "
                "nothing"
            )
        if self.prefill_graph_sizes is not None and min(self.prefill_graph_sizes, default=0) < 1:
            said = ",".join(map(str, self.prefill_graph_sizes))
            raise ConfigError(
                f"--prefill-graph-sizes {said}: must be numbers of at least 1; "
                "--disable-prefill-graph captures nothing"
            )
        if self.max_itl is not None and not 0 <= self.max_itl < 1e6:
            raise ConfigError(
                f"--max-itl {self.max_itl:g}: must be milliseconds, at least 0 (which is no limit)"
            )
        if self.max_itl and self.deterministic:
            raise ConfigError(
                f"--max-itl {self.max_itl:g} with --deterministic: chunks that are sized by time "
                "differ from run to run, and so may bits: leave one of them out"
            )
        if self.context_length == 1:
            raise ConfigError(
                "--context-length 1: must be at least 2, for one token of prompt and one of output"
            )
        if self.max_running_requests > MOST_REQUESTS:
            raise ConfigError(
                f"--max-running-requests {self.max_running_requests}: must be at most "
                f"{MOST_REQUESTS}; more may wait (--max-queued-requests)"
            )
        _fraction(self)
        _choice(self)
        check_speculation(self)
        _divided(self)

    @property
    def attention_tp(self) -> int:
        """Ranks that divide the heads of attention."""
        return 1 if self.enable_dp_attention else self.tp

    @property
    def attention_ranks(self) -> int:
        """Ranks that divide the sequences: each has a KV cache of its own."""
        return self.tp if self.enable_dp_attention else 1


def check_graph_sizes(config: EngineConfig) -> None:
    """Of a configuration that has its defaults. Raises ConfigError."""
    off = "--disable-graph" if config.disable_graph else "--disable-prefill-graph"
    limits = (
        ("graph_sizes", config.disable_graph, "max_running_requests", "requests run at once"),
        (
            "prefill_graph_sizes",
            config.disable_graph or config.disable_prefill_graph,
            "max_step_tokens",
            "are computed in one step",
        ),
    )
    for name, is_off, limit, said in limits:
        given, most = getattr(config, name), getattr(config, limit)
        if given is not None and is_off:
            said = ",".join(map(str, given))
            raise ConfigError(f"{_flag(name)} {said}: {off} captures none; leave one of them out")
        if given is not None and max(given) > most:
            raise ConfigError(
                f"{_flag(name)} {','.join(map(str, given))}: at most {_flag(limit)} {most} {said}"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = _f("127.0.0.1", "address to listen on", group="server")
    port: int = _f(30000, "port to listen on (0: any free one)")
    served_model_name: str | None = _f(None, "model name in the API (default: folder name)")
    api_key: tuple[str, ...] = _f(
        (),
        "require this bearer token on every route but /health, /ping, /metrics and the dashboard's "
        "files; "
        "may be given several times, and nobody learns of another key's prompts",
        repeatable=True,
    )
    api_key_file: str | None = _f(
        None, "file of more keys, one a line: those on the command line are seen by all processes"
    )
    admin_api_key: str | None = _f(
        None, "key without which nobody flushes the cache, profiles, or loads adapters"
    )
    ssl_certfile: str | None = _f(None, "PEM file with the certificate: serve HTTPS")
    ssl_keyfile: str | None = _f(None, "PEM file with the certificate's key")
    ssl_keyfile_password: str | None = _f(None, "password of --ssl-keyfile")
    cors_origins: tuple[str, ...] = _f(
        (), "web origins whose pages may call the API, or '*' for all (comma separated)"
    )
    allowed_hosts: tuple[str, ...] = _f(
        (),
        "names by which clients reach this server, like api.example.com or *.example.com (comma "
        "separated; default: any, but on loopback without a key only localhost and addresses)",
    )
    client_timeout: float = _f(
        60.0, "seconds for a request's head, and that a client may take in nothing"
    )
    max_body: int | None = _f(
        None,
        "largest request body, e.g. 16MB (default: 16 bytes for each token of the context, and 1 "
        "MiB)",
        size=True,
    )
    clamp_max_tokens: bool = _f(
        False,
        "where a request's limit of tokens is above what the context has left, make that the limit "
        "instead of refusing it (/v1/messages always does)",
    )
    dp: int = _f(
        1,
        "data-parallel replicas of the engine, each of --tp ranks with devices of their own; "
        "requests go to the one with the least work",
    )
    on_engine_death: str = _f(
        "restart",
        "when an engine process dies or hangs: start it anew, or end the server",
        choices=("restart", "exit"),
    )
    max_engine_restarts: int = _f(
        3, "restarts before the server exits; ten minutes of serving forget them"
    )
    watchdog_timeout: float = _f(
        300.0, "seconds without a sign after which an engine with work hangs (0: wait for ever)"
    )
    shutdown_timeout: float = _f(
        20.0, "seconds that running requests may take after SIGTERM or Ctrl-C; twice: none"
    )
    profile_dir: str | None = _f(
        None, "folder for the traces of /start_profile, which is refused without it"
    )
    reasoning_parser: str = _f(
        "auto",
        "who splits reasoning from the answer: deepseek-v3, deepseek-r1, glm45, none, or the "
        "model's",
        also={"deepseek_v3": "deepseek-v3", "deepseek_r1": "deepseek-r1"},
    )
    tool_call_parser: str = _f(
        "auto",
        "who reads tool calls: deepseekv3, deepseekv31, deepseekv32, glm45, glm47, none, or the "
        "model's",
        also={f"deepseek_{name}": f"deepseek{name}" for name in ("v3", "v31", "v32")},
    )
    strip_thinking_cache: bool = _f(
        False, "keep reasoning out of the prefix cache: later prompts leave it out anyway"
    )
    unknown_tools: str = _f(
        "keep",
        "calls of functions that the client did not offer: passed on, or dropped",
        choices=("keep", "drop"),
    )
    routes: tuple[str, ...] = _f((), "plugins whose HTTP routes are added (comma separated)")
    log_level: str = _f(
        "info", "least important lines to write", choices=LOG_LEVELS, group="observability"
    )
    log_format: str = _f("text", "lines for people, or JSON objects", choices=("text", "json"))
    access_log: bool = _f(True, "write a line for every request")
    otlp_endpoint: str | None = _f(
        None, "OpenTelemetry collector for traces, e.g. http://127.0.0.1:4318 (extra: otel)"
    )

    def __post_init__(self) -> None:
        _typed(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: a port is between 0 and 65535")
        for key in self.api_key:
            check_key(key, "--api-key")
        if self.admin_api_key is not None:
            check_key(self.admin_api_key, "--admin-api-key")
            if self.admin_api_key in self.api_key:
                raise ConfigError("--admin-api-key: is one of --api-key, too: give another")
        _positive(self, ("dp",) if self.max_body is None else ("max_body", "dp"))
        for name in ("max_engine_restarts", "watchdog_timeout", "shutdown_timeout"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: must be at least 0")
        for name in ("ssl_keyfile", "ssl_keyfile_password"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{_flag(name)}: needs --ssl-certfile beside it")
        if not 0 < self.client_timeout < 1e6:
            raise ConfigError(f"--client-timeout {self.client_timeout}: must be above 0")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    f"--cors-origins {origin!r}: write '*', or scheme and host as browsers send "
                    "them, like https://chat.example.com"
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[^*/:\s]+", host):
                raise ConfigError(
                    f"--allowed-hosts {host!r}: write a name without scheme and port, like "
                    "api.example.com, or *.example.com for all below it"
                )
        _choice(self)


def check_key(key: str, where: str) -> None:
    """ConfigError for what no header carries as it is; the key is not told."""
    if not key:
        raise ConfigError(
            f"{where}: is empty, so that everyone would have it: give a key, or leave it out"
        )
    if key != key.strip() or not key.isprintable():
        raise ConfigError(f"{where}: must be printable, on one line, without spaces around it")


_TYPES = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": tuple,
    "tuple[int, ...]": tuple,
    "None": type(None),
}


def _typed(config: Any) -> None:
    """Refuse values of another type than the field's: the offline API passes what it is given."""
    for f in fields(config):
        value = getattr(config, f.name)
        wanted = tuple(_TYPES[part] for part in str(f.type).split(" | "))
        if float in wanted:
            wanted += (int,)
        right = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        if isinstance(value, tuple):
            item_type = int if "tuple[int" in str(f.type) else str
            right = right and all(type(item) is item_type for item in value)
        if not right:
            raise ConfigError(f"{_flag(f.name)} {value!r}: must be of type {f.type}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positive(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{_flag(name)} {getattr(config, name)}: must be at least 1")


def _fraction(config: EngineConfig) -> None:
    names = ("mem_fraction_static", "memory_utilization")
    given = [name for name in names if getattr(config, name) is not None]
    for name in given:
        if not 0.0 < (share := getattr(config, name)) <= 1.0:
            raise ConfigError(f"{_flag(name)} {share:g}: must be above 0 and at most 1, like 0.88")
    given += ["kv_memory"] if config.kv_memory is not None else []
    if given[1:]:
        raise ConfigError(
            f"{_flag(given[0])}: leave it out, or {_flag(given[1])}: both size one cache"
        )


def _divided(config: EngineConfig) -> None:
    if not config.enable_dp_attention:
        return
    if config.tp == 1:
        raise ConfigError(
            "--enable-dp-attention: attention is divided among the ranks of --tp, and that is 1: "
            "give --tp N beside it, or leave it out"
        )


def _choice(config: Any) -> None:
    for f in fields(config):
        choices = f.metadata.get("choices")
        value = getattr(config, f.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{_flag(f.name)} {value!r}: must be one of {', '.join(filter(None, choices))}"
            )


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
