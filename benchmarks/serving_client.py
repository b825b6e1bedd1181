"""What `ds-runtime bench serving` itself costs: its processor time per streamed event, against a
server that writes ready-made events, each in a write of its own, as fast as it can.

Usage: python benchmarks/serving_client.py [--streams 256] [--events 128]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
from typing import Any

import uvloop

from ds_runtime_bench.serving.client import Target
from ds_runtime_bench.serving.load import Load
from ds_runtime_bench.serving.measure import Asked, measure
from ds_runtime_bench.serving.prompts import Prompt
from ds_runtime_bench.serving.sessions import Session

_CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1790000000,
    "model": "null",
    "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _framed(value: object) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(sock: socket.socket, events: int) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": events}
    event = _framed(_CHUNK)
    end = _framed(_CHUNK | {"choices": [], "usage": usage}) + _framed(b"[DONE]") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            size = 0
            while header := (await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    size = int(header.split()[1])
            await reader.readexactly(size)
            writer.write(_HEAD)
            for _ in range(events):
                writer.write(event)
                await asyncio.sleep(0)
            writer.write(end)
        writer.close()

    async with await asyncio.start_server(answer, sock=sock) as server:
        await server.serve_forever()


def _child(sock: socket.socket, events: int) -> None:
    uvloop.run(_serve(sock, events))


async def _measure(url: str, prompts: list[Session], load: Load) -> dict[str, Any]:
    target = Target(url)
    try:
        return (await measure(target, Asked(model="null"), prompts, load)).report
    finally:
        await target.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--events", type=int, default=128)
    args = parser.parse_args()
    sock = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_child, args=(sock, args.events), daemon=True)
    child.start()
    prompts = [Session(Prompt(args.events, text="x"))] * (4 * args.streams)
    load = Load(concurrency=args.streams)
    report = uvloop.run(_measure(f"http://127.0.0.1:{sock.getsockname()[1]}", prompts, load))
    child.terminate()
    events = len(prompts) * args.events
    seconds = report["client_cpu"] * report["duration"]
    print(
        f"{report['completed']} streams of {args.events} events, {args.streams} at once: "
        f"{seconds / events * 1e6:.2f} us of client CPU per event, "
        f"{events / report['duration']:.0f} events/s, client {report['client_cpu']:.0%} of a core"
    )
    return 0 if report["completed"] == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
