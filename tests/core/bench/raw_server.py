"""HTTP servers whose every byte and pause a test wrote."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest

MODELS = b'{"object": "list", "data": [{"id": "other-7b", "object": "model"}]}'
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def chunk(text=None, tokens=None, **delta):
    choices = (
        [] if text is None and not delta else [{"index": 0, "delta": {"content": text} | delta}]
    )
    body = {"id": "x", "object": "chat.completion.chunk", "choices": choices}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Server:
    """HTTP written by hand: `reply` says (status, headers, pieces), a piece being bytes or a
    pause; without a length or chunks, the end of the connection ends the answer."""

    def __init__(self, reply):
        self.reply, self.seen, self.connections = reply, [], 0
        self.info = 404, {}, [b"no such page"]

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while line := await reader.readline():
                head = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    head[name.lower()] = value.strip()
                raw = await reader.readexactly(int(head.get("content-length", 0)))
                path = line.split()[1].decode()
                self.seen.append((path, head, json.loads(raw) if raw else None))
                if path.endswith("/models"):
                    status, headers, pieces = 200, {}, [MODELS]
                elif path == "/server_info":
                    status, headers, pieces = self.info
                else:
                    status, headers, pieces = self.reply(*self.seen[-1])
                lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in headers.items())]
                whole = all(isinstance(p, bytes) for p in pieces) and status != "raw"
                if whole and "content-length" not in headers:
                    lines.append(f"content-length: {sum(map(len, pieces))}")
                elif not whole:
                    lines.append("transfer-encoding: chunked")
                writer.write("\r\n".join([*lines, "", ""]).encode())
                for piece in pieces:
                    if isinstance(piece, bytes):
                        writer.write(piece if whole else b"%x\r\n%b\r\n" % (len(piece), piece))
                        await writer.drain()
                    elif piece == "close":
                        return
                    else:
                        await asyncio.sleep(piece)
                if not whole:
                    writer.write(b"0\r\n\r\n")
        finally:
            writer.close()


@contextmanager
def serving(reply):
    server, loop, ready = Server(reply), asyncio.new_event_loop(), threading.Event()

    async def run():
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server.stop = asyncio.Event()
        ready.set()
        await server.stop.wait()
        listener.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait(5)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join(5)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with pytest.raises((asyncio.CancelledError, Exception)):
                loop.run_until_complete(task)
        for _ in range(3):  # a transport that is closing closes its socket in the next round
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
