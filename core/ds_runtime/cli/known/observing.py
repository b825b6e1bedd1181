"""Logs, metrics, traces, and what looks into a running model."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import Spelling

_QUIET = Spelling("is --no-access-log here", {"access_log": "False"})
_LINE = "a line per request is logged, without its text"
_LOGGED = Spelling(_LINE, {"access_log": "True"})

LOGS: Mapping[str, str | Spelling] = {
    "--disable-log-requests": _QUIET,
    "--no-enable-log-requests": _QUIET,
    "--disable-uvicorn-access-log": _QUIET,
    "--enable-log-requests": _LOGGED,
    "--enable-uvicorn-access-log": _LOGGED,
    "--no-disable-uvicorn-access-log": _LOGGED,
    "--log-requests": _LOGGED,
    **ignored(
        _LINE,
        """
        --enable-request-time-stats-logging  --max-log-len N
        --[no-]enable-log-deltas  --disable-log-deltas
        """,
    ),
    **ends(f"{_LINE}: leave it out", "--log-requests-level 0|1|N --enable|disable-log-outputs"),
    **ends("is --log-format here", "--log-requests-format text|X"),
    **ends(
        "lines go to stderr: let the shell send them elsewhere",
        """
        --log-requests-target stdout|X...
        """,
    ),
    **ignored(
        "--no-access-log leaves the lines of all routes out",
        """
        --uvicorn-access-log-exclude-prefixes X...  --disable-access-log-for-endpoints X
        """,
    ),
    **ends("is --log-level and --log-format here", "--logging-config X --log-config-file X"),
    **ignored("the log has the stack of errors that nobody foresaw", "--log-error-stack"),
    **ignored("--log-level is for all lines", "--uvicorn-log-level X --log-level-http X"),
    **ignored(
        "/metrics and the dashboard have what steps do",
        """
        --decode-log-interval N  --show-time-cost  --aggregate-engine-logging
        --enable|disable-logging-iteration-details
        """,
    ),
    **ends(
        "requests are kept nowhere, not even after a crash: leave it out",
        """
        --crash-dump-folder X
        """,
    ),
}
METRICS: Mapping[str, str | Spelling] = {
    "--otlp-traces-endpoint": "otlp_endpoint",
    **ignored("not needed: /metrics is always there", "--enable-metrics"),
    **ignored(
        "/metrics is always there",
        """
        --disable-log-stats  --enable-metrics-for-all-schedulers
        """,
    ),
    **ignored("not needed: /load says it", "--enable|disable-server-load-tracking"),
    **ends(
        "/metrics has what docs/metrics.md lists: leave it out",
        """
        --show-hidden-metrics-for-version X  --kv-cache-metrics  --kv-cache-metrics-sample N
        --enable|disable-mfu-metrics
        """,
    ),
    **ends(
        "metrics have the labels of docs/metrics.md: let the collector add others",
        """
        --extra-metric-labels X  --tokenizer-metrics-allowed-custom-labels X...
        --tokenizer-metrics-custom-labels-header X
        """,
    ),
    **ends(
        "histograms have fixed buckets: leave it out",
        """
        --bucket-time-to-first-token N...  --bucket-inter-token-latency N...
        --bucket-e2e-request-latency N...  --prompt-tokens-buckets X...
        --generation-tokens-buckets X...  --custom-histogram-buckets X
        """,
    ),
    **ends(
        "metrics are read at /metrics: leave it out",
        """
        --export-metrics-to-file  --export-metrics-to-file-dir X  --load-publish-endpoint off|X
        --enable-forward-pass-metrics
        """,
    ),
    **ignored(
        "metrics are read at /metrics",
        """
        --forward-pass-metrics-worker-id X  --forward-pass-metrics-ipc-name X
        --load-snapshot-publish-interval N
        """,
    ),
    **ignored("--otlp-endpoint turns traces on", "--enable-trace"),
    **ignored(
        "a trace has a request with its queue, prefill and decode",
        "--trace-modules X --collect-detailed-traces X...",
    ),
    **ends("is the variable OTEL_SERVICE_NAME here", "--otlp-service-name X"),
}
LOOKING: Mapping[str, str | Spelling] = {
    **ends(
        "is ds-runtime bisect here, which compares every op with float64",
        """
        --debug-tensor-dump-output-folder X  --debug-tensor-dump-layers N...
        --debug-tensor-dump-input-file X
        """,
    ),
    **ends("is --profile-dir FOLDER here", "--profiler-config {}|X"),
    **ends("is --watchdog-timeout here", "--watchdog-config {}|X"),
    **ignored("a server's /start_profile writes traces", "--ray-workers-use-nsight"),
    **ends(
        "the start names variables that nothing reads: leave it out", "--fail-on-environ-validation"
    ),
    **ignored(
        "steps are captured and tried before the port opens",
        "--jit-monitor-mode X --jit-monitor-verbose",
    ),
    **ends("no code is attached to the model: leave it out", "--forward-hooks X"),
    **ends(
        "the cache is not checked while serving: leave it out",
        """
        --kv-canary none|X  --kv-canary-real-data none|X  --kv-canary-sweep-interval N
        """,
    ),
    **ignored("--watchdog-timeout restarts an engine that hangs", "--soft-watchdog-timeout N"),
}
