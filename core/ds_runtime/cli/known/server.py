"""The server: what clients may ask, and how it listens."""

from __future__ import annotations

from collections.abc import Mapping

from ds_runtime.cli.known.notation import ends, ignored
from ds_runtime.config.spelling import ALWAYS, Spelling

_GRAMMARS = "one serves all kinds of grammars"
_READER = "one process reads and writes text"

API: Mapping[str, str | Spelling] = {
    **ignored(
        "not needed: tools are parsed where a request brings them",
        """
        --enable|disable-auto-tool-choice
        """,
    ),
    **ignored("not needed: thinking is parsed where the model thinks", "--enable-reasoning"),
    **ignored(
        _GRAMMARS,
        """
        --grammar-backend X  --guided-decoding-backend X
        --disable-outlines-disk-cache
        """,
    ),
    **ends(
        "the spaces that JSON may have are fixed: leave it out",
        """
        --constrained-json-whitespace-pattern X  --constrained-json-disable-any-whitespace
        --constrained-json-max-whitespace-cnt N
        """,
    ),
    **ends(
        "one backend serves all grammars, and JSON's spaces are fixed: leave it out",
        "--structured-outputs-config {}|X",
    ),
    **ignored("the template says what it takes", "--chat-template-content-format X"),
    **ends("is --chat-template FILE here", "--hf-chat-template-name X"),
    **ends("a request brings them: chat_template_kwargs", "--default-chat-template-kwargs X"),
    **ends("requests bring no template: leave it out", "--trust-request-chat-template"),
    **ends("completions have no template: leave it out", "--completion-template X"),
    **ends("thinking is not held to a grammar: leave it out", "--enable-strict-thinking"),
    **ends("tool_choice holds calls to a grammar: leave it out", "--tool-strict-level auto|X"),
    **ignored(ALWAYS, "--exclude-tools-when-tool-choice-none"),
    **ends(
        "tools that a request forbids are not in its prompt: leave it out",
        "--no-exclude-tools-when-tool-choice-none",
    ),
    **ends("the model's own marks of thinking are known: leave it out", "--reasoning-config X"),
    **ends("a request names an effort that the model knows", "--reasoning-effort-map X"),
    **ends(
        "thinking that a request turns off is off: leave it out",
        "--anthropic-disabled-thinking-effort auto|none|X",
    ),
    **ends("the server runs no tools: clients run them", "--tool-server X"),
    "--enable-force-include-usage": Spelling(
        "is --stream-response-default-include-usage here",
        {"stream_response_default_include_usage": "True"},
    ),
    "--disable-force-include-usage": Spelling(
        "is so unless --stream-response-default-include-usage follows",
        {"stream_response_default_include_usage": "False"},
    ),
    **ignored(
        "not needed: usage always says it",
        """
        --enable|disable-prompt-tokens-details  --enable-cache-report
        """,
    ),
    **ends("a request asks for it: return_token_ids", "--return-input-ids --return-output-ids"),
    **ignored(ALWAYS, "--enable-response-store"),
    **ignored("requests store no files", "--file-storage-path X"),
    **ends(
        "answers hold text and logprobs alone: leave it out",
        """
        --enable-return-hidden-states  --return-hidden-states-mode X
        --enable-return-aux-hidden-states  --return-aux-hidden-state-layer-ids N...
        --enable|disable-return-routed-experts  --enable-return-indexer-topk
        --return-sampling-mask  --aux-output-config X
        """,
    ),
    **ignored("answers hold no sampling masks", "--sampling-mask-max-tokens N"),
    **ends("answers have the role assistant: leave it out", "--response-role assistant|X"),
    **ends(
        "answers hold no system_fingerprint: leave it out",
        "--fingerprint-mode none|X --fingerprint-value X",
    ),
    **ends(
        "answers hold no times, and /metrics has them: leave it out",
        "--enable|disable-per-request-metrics --per-request-spec-decode-metrics none|X",
    ),
    **ends("logprobs hold tokens as text: leave it out", "--return-tokens-as-token-ids"),
    **ends("logprobs are those of raw logits: leave it out", "--logprobs-mode raw_logprobs|X"),
    **ends("an answer may hold 20 logprobs of each token: leave it out", "--max-logprobs 20|N"),
    **ends("requests bring no draws: leave it out", "--enable|disable-trace-replay"),
    **ignored("every answer has an x-request-id", "--enable|disable-request-id-headers"),
    **ends(
        "an answer sends nothing between tokens: let the proxy wait longer",
        "--sse-keep-alive-interval 0|N",
    ),
    **ends("answers have no watermark: leave it out", "--enable-watermark --watermark-config X"),
    **ends(
        "an event of /generate has the whole text so far: leave it out",
        """
        --incremental-streaming-output
        """,
    ),
    **ignored("every step's tokens are sent at once", "--stream-interval N --batch-notify-size N"),
    **ends("requests bring their own seed: leave it out", "--random-seed 0|N --seed 0|N"),
}
LISTENING: Mapping[str, str | Spelling] = {
    **ignored(
        "one process speaks HTTP for all replicas",
        """
        --api-server-count N  --enable-http-worker-reuseport
        """,
    ),
    **ignored(
        _READER,
        """
        --renderer-num-workers N
        --tokenizer-worker-num N  --detokenizer-worker-num N  --enable-dynamic-batch-tokenizer
        --dynamic-batch-tokenizer-batch-size N  --dynamic-batch-tokenizer-batch-timeout N
        --enable-tokenizer-batch-encode  --disable-tokenizer-batch-decode
        """,
    ),
    **ends("is --cors-origins A,B here", "--allowed-origins X"),
    **ends(
        "pages of --cors-origins may use all methods, and bring a key: leave it out",
        """
        --allowed-methods ["*"]|X  --allowed-headers ["*"]|X  --allow-credentials
        """,
    ),
    **ends("the server listens on a port: --host and --port", "--uds X"),
    **ends(
        "the server speaks HTTP/1.1 alone: leave it out",
        """
        --enable-http2  --grpc  --grpc-mode  --smg-grpc-mode  --grpc-port N  --sidecar X
        """,
    ),
    **ignored(
        "the server speaks HTTP/1.1 alone",
        """
        --http2-max-concurrent-streams N  --http2-initial-connection-window-size N
        --grpc-response-timeout-secs N  --sidecar-args X  --grpc-http-sidecar-port N
        --smg-http-sidecar-port N
        """,
    ),
    **ends(
        "routes begin at /: let the proxy take its prefix off",
        "--fastapi-root-path X --root-path X",
    ),
    **ends(
        "clients bring no certificates: --api-key knows them",
        "--ssl-ca-certs X --ssl-cert-reqs 0|N",
    ),
    **ends("Python's own ciphers are used: leave it out", "--ssl-ciphers X"),
    **ends(
        "certificates are read at the start: restart the server", "--enable|disable-ssl-refresh"
    ),
    **ends(
        "a request's head has fixed limits: leave it out",
        "--h11-max-incomplete-event-size N --h11-max-header-count N",
    ),
    **ends("/openapi.json is always there: leave it out", "--disable|enable-fastapi-docs"),
    **ends("the documents are the folder docs/: leave it out", "--enable|disable-offline-docs"),
    **ends(
        "clients read tokenizer_config.json themselves: leave it out",
        "--enable|disable-tokenizer-info-endpoint",
    ),
    **ignored(
        "steps are captured and tried before the port opens",
        """
        --skip-server-warmup  --warmups X
        """,
    ),
    **ignored(
        "memory nodes and threads are the platform's to choose",
        """
        --numa-node N...  --numa-bind  --numa-bind-nodes N...  --numa-bind-cpus X...
        """,
    ),
    **ignored("an engine without requests sleeps", "--sleep-on-idle"),
    **ignored(
        "the engine's garbage collection has no options",
        """
        --gc-threshold N...  --gc-warning-threshold-secs N
        """,
    ),
}
