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
        --enable-auto-tool-choice
        """,
    ),
    **ignored("not needed: thinking is parsed where the model thinks", "--enable-reasoning"),
    **ignored(
        _GRAMMARS,
        """
        --grammar-backend X  --guided-decoding-backend X  --structured-outputs-config X
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
    **ignored("the template says what it takes", "--chat-template-content-format X"),
    **ends("is --chat-template FILE here", "--hf-chat-template-name X"),
    **ends("a request brings them: chat_template_kwargs", "--default-chat-template-kwargs X"),
    **ends("requests bring no template: leave it out", "--trust-request-chat-template"),
    **ends("completions have no template: leave it out", "--completion-template X"),
    **ends("thinking is not held to a grammar: leave it out", "--enable-strict-thinking"),
    **ends("the server runs no tools: clients run them", "--tool-server X"),
    "--enable-force-include-usage": Spelling(
        "is --stream-response-default-include-usage here",
        {"stream_response_default_include_usage": "True"},
    ),
    **ignored(
        "not needed: usage always says it",
        """
        --enable-prompt-tokens-details  --enable-cache-report
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
        --enable-return-routed-experts  --enable-return-indexer-topk
        """,
    ),
    **ignored("answers hold no sampling masks", "--sampling-mask-max-tokens N"),
    **ends("answers have no watermark: leave it out", "--enable-watermark --watermark-config X"),
    **ends(
        "an event of /generate has the whole text so far: leave it out",
        """
        --incremental-streaming-output
        """,
    ),
    **ignored("every step's tokens are sent at once", "--stream-interval N --batch-notify-size N"),
    **ignored("requests bring their own seed", "--random-seed N --seed N"),
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
        --tokenizer-worker-num N  --detokenizer-worker-num N  --enable-dynamic-batch-tokenizer
        --dynamic-batch-tokenizer-batch-size N  --dynamic-batch-tokenizer-batch-timeout N
        --enable-tokenizer-batch-encode  --disable-tokenizer-batch-decode
        """,
    ),
    **ends("is --cors-origins A,B here", "--allowed-origins X"),
    **ends(
        "the server speaks HTTP/1.1 alone: leave it out",
        """
        --enable-http2  --grpc-mode  --smg-grpc-mode  --grpc-port N  --sidecar X
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
    **ends("routes begin at /: let the proxy take its prefix off", "--fastapi-root-path X"),
    **ends("clients bring no certificates: --api-key knows them", "--ssl-ca-certs X"),
    **ends("certificates are read at the start: restart the server", "--enable-ssl-refresh"),
    **ignored(
        "steps are captured and tried before the port opens",
        """
        --skip-server-warmup  --warmups X
        """,
    ),
    **ignored("memory nodes and threads are the platform's to choose", "--numa-node N..."),
    **ignored("an engine without requests sleeps", "--sleep-on-idle"),
    **ignored(
        "the engine's garbage collection has no options",
        """
        --gc-threshold N...  --gc-warning-threshold-secs N
        """,
    ),
}
