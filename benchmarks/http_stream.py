"""CPU time of the front end per streamed token: HTTP, detokenising and parsing, in front of a null
engine. A client with many streams reads chat completions that reason, answer and call a tool; the
server reads reasoning and calls with the demo's parsers.

    python benchmarks/http_stream.py [--streams 64] [--tokens 512] [--rate 50] [--no-record]

The rounds' row goes to benchmarks/results/http_stream.jsonl.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import selectors
import socket
import sys
import time
from itertools import cycle
from pathlib import Path

import psutil
import zmq

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.engine.messages import Ready, Stop, SubmitGroup, Tokens, decode_to_engine, encoder
from ds_runtime.engine.process.transport import ipc
from ds_runtime.server.serve import serve
from ds_runtime.text.tokenizer import Tokenizer
from ds_runtime_bench.record import append, environment

RESULTS = Path(__file__).parent / "results" / "http_stream.jsonl"
TEXT = (
    "<think>The user asks for the weather, so a tool must be called with the city.</think>"
    "Let me look that up: it is 5 < 7 o'clock there.\n\n"
)
CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Rome", "unit": "celsius", "days": [1, 2, 3], "note": "as \\"warm\\" as it gets"}'
    "\n```<｜tool▁call▁end｜>\n"
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


def engine_main(to_engine: str, from_engine: str, rate: float) -> None:
    """Sends one token per request and step, `rate` steps a second, one write for all."""
    tokenizer = Tokenizer.load(resolve_model("demo"))
    text, calls = tokenizer.encode(TEXT), tokenizer.encode("<｜tool▁calls▁begin｜>")
    calls += tokenizer.encode(CALL)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(to_engine)
    push.connect(from_engine)
    ready = Ready(
        banner="null engine",
        context_length=8192,
        vocab_size=tokenizer.vocab_size,
        kv_tokens=1 << 20,
        page_size=16,
        queue_limit=4096,
    )
    push.send(encoder.encode([ready]))
    running: dict[str, tuple[cycle[int], int]] = {}
    while True:
        begin = time.perf_counter()
        while pull.poll(0 if running else 100):
            match decode_to_engine.decode(pull.recv()):
                case SubmitGroup(rids=rids, params=params):
                    for rid in rids:
                        own = cycle([*text, *calls]), params.max_tokens or 0
                        running[rid] = own
                case Stop():
                    return
        messages = []
        for rid, (script, left) in list(running.items()):
            finish = "length" if left == 1 else None
            messages.append(Tokens(rid=rid, tokens=[next(script)], finish=finish))
            running[rid] = script, left - 1
            if finish:
                del running[rid]
        if messages:
            push.send(encoder.encode(messages))
        time.sleep(max(0.0, 1 / rate - (time.perf_counter() - begin)))


class NullEngine:
    """`server.serve.Engine`, as `serve` starts it."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.to_engine, self.from_engine = ipc(folder, "to_engine"), ipc(folder, "from_engine")
        args = (self.to_engine, self.from_engine, rate)
        self._process = multiprocessing.get_context("spawn").Process(target=engine_main, args=args)

    def start(self) -> None:
        self._process.start()

    def poll(self) -> str | None:
        code = self._process.exitcode
        return None if code is None else f"the null engine left with {code}"

    def trace(self) -> None:
        return None

    def stop(self, timeout: float = 5.0) -> None:
        self._process.terminate()
        self._process.join(timeout)


def server_main(port: int, rate: float, profile: str | None) -> None:
    """The front end alone, as `ds-runtime serve` runs it."""
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    serve(
        EngineConfig(),
        ServerConfig(port=port),
        launch=lambda config, folder, explicit, replica: NullEngine(Path(folder), rate),
    )
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)


def request(tokens: int) -> bytes:
    """One streamed chat completion, as bytes."""
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "tools": TOOLS,
        "stream": True,
        "max_tokens": tokens,
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def stream_all(port: int, streams: int, tokens: int) -> bytes:
    """Read `streams` answers at once to their end; the bytes of the first."""
    selector, first = selectors.DefaultSelector(), b""
    for index in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request(tokens))
        selector.register(sock, selectors.EVENT_READ, [index, b""])
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 18)
            key.data[1] = key.data[1][-16:] + data
            if key.data[0] == 0:
                first += data
            if not data or b"[DONE]" in key.data[1]:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return first


def wait_until_up(port: int) -> None:
    """Until /health says so."""
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
                sock.sendall(head + b"Connection: close\r\n\r\n")
                if sock.recv(64).split()[1] == b"200":
                    return
        except (OSError, IndexError):
            pass
        time.sleep(0.1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rate", type=float, default=50, help="engine steps per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--profile", help="cProfile of the server, into this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=server_main, args=(args.port, args.rate, args.profile))
    server.start()
    assert server.pid is not None
    wait_until_up(args.port)
    stream_all(args.port, 4, 64)
    process = psutil.Process(server.pid)
    found, shares = [], []
    for _ in range(args.rounds):
        before, begin = process.cpu_times(), time.perf_counter()
        first = stream_all(args.port, args.streams, args.tokens)
        seconds, after = time.perf_counter() - begin, process.cpu_times()
        user, system = after.user - before.user, after.system - before.system
        number = args.streams * args.tokens
        chunks = first.count(b"data: ")
        found.append(round((user + system) / number * 1e6, 1))
        shares.append(round((user + system) / seconds, 3))
        print(
            f"{args.streams} streams x {args.tokens} tokens in {seconds:.1f} s: "
            f"{shares[-1]:.0%} of a core, "
            f"{(user + system) / number * 1e6:.1f} us of CPU per token "
            f"({user / number * 1e6:.1f} user, {system / number * 1e6:.1f} system), "
            f"{chunks} events and {len(first)} bytes in the first stream"
        )
    process.send_signal(2)
    server.join(20)
    if not (args.no_record or args.profile):
        command = f"python benchmarks/http_stream.py {' '.join(sys.argv[1:])}".rstrip()
        asked = {"streams": args.streams, "tokens": args.tokens, "rate": args.rate}
        row = {
            "bench": "http_stream",
            **asked,
            "us_per_token": found,
            "core_share": shares,
            "command": command,
        }
        append(RESULTS, row | environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
