"""Connections: whatever comes is parsed in parts, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_runtime.config import ServerConfig
from ds_runtime.server.http.web import web

HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
SIZE = 1 << 20  # bytes of a client that means harm
MANY = {
    "requests": GET * (SIZE // len(GET)),
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * (SIZE // 6),
    "headers": HEAD + b"a: b\r\n" * (SIZE // 6) + b"\r\n",
    "no request": b"\r\n" * (SIZE // 2),
}
LONGEST = 0.015  # seconds between two turns of the loop
TRIES = 5  # the machine's own noise lengthens them, and never shortens one


async def echo(scope, receive, send):
    """Answers with the body's length, once it is there."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    said = b"%d" % size
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@contextlib.asynccontextmanager
async def serving():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as sock:
        server = web(echo, ServerConfig(), sock, grace=1)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        connections = server.server_state.connections
        yield sock.getsockname(), lambda: max((len(c.pipeline) for c in connections), default=0)
        server.should_exit = True
        await task


async def exchange(address, parts):
    """What comes back for these parts, until all of it is there or the server closes."""
    reader, writer = await asyncio.open_connection(*address)

    async def write():
        with contextlib.suppress(OSError):
            for part in parts:
                writer.write(part)
                await writer.drain()

    writing = asyncio.create_task(write())
    said = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            while more := await reader.read(1 << 16):
                said += more
    writing.cancel()
    writer.close()
    return said


async def longest_turn(address, data, waiting):
    """Seconds that the loop was away for longest while a client sent `data`, and the most requests
    that waited for others on the same connection."""
    longest, most, done = 0.0, 0, False

    async def tick():
        nonlocal longest, most
        last = time.perf_counter()
        while not done:
            await asyncio.sleep(0)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            most = max(most, waiting())

    ticking = asyncio.create_task(tick())
    sending = asyncio.to_thread(_send, address, data)
    await sending
    await asyncio.sleep(0.1)
    done = True
    await ticking
    return longest, most


def _send(address, data):
    with socket.create_connection(address) as one, contextlib.suppress(OSError):
        one.settimeout(0.5)
        one.sendall(data)


@pytest.mark.parametrize("what", MANY)
def test_no_client_keeps_the_loop(what):
    async def run():
        async with serving() as (address, waiting):
            found = []
            while not found or (min(found) > LONGEST and len(found) < TRIES):
                longest, most = await longest_turn(address, MANY[what], waiting)
                found.append(longest)
                assert most <= 1 + 4096 // len(GET)
            assert min(found) <= LONGEST, found

    uvloop.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("count", [256, 257, 10_000])
def test_a_request_has_so_many_headers_at_most(count):
    async def run():
        async with serving() as (address, _):
            head = b"GET / HTTP/1.1\r\nConnection: close\r\n" + b"a: b\r\n" * (count - 1) + b"\r\n"
            return await exchange(address, [head])

    said = uvloop.run(asyncio.wait_for(run(), 30))
    if count <= 256:
        assert said.startswith(b"HTTP/1.1 200 ") and said.endswith(b"\r\n\r\n0")
    else:
        assert said.startswith(b"HTTP/1.1 400 ") and b"more than 256 headers" in said


BODIES = st.lists(st.sampled_from([0, 1, 7, 4096, 5000, 70_000, 300_000]), min_size=1, max_size=4)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=BODIES, chunked=st.booleans(), cut=st.integers(1, 9000))
def test_requests_on_one_connection_are_answered_in_order(sizes, chunked, cut):
    """Whatever their sizes, and wherever the network cuts them."""
    sent = b""
    for number, size in enumerate(sizes, 1):
        head = HEAD + (b"Connection: close\r\n" if number == len(sizes) else b"")
        if chunked:
            pieces = b"".join(
                b"%x\r\n%b\r\n" % (len(p), p)
                for p in (b"x" * min(3000, size - n) for n in range(0, size, 3000))
            )
            sent += head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
        else:
            sent += head + b"Content-Length: %d\r\n\r\n%b" % (size, b"x" * size)

    async def run():
        async with serving() as (address, _):
            return await exchange(address, [sent[n : n + cut] for n in range(0, len(sent), cut)])

    said = uvloop.run(asyncio.wait_for(run(), 30))
    found = [int(one.split(b"HTTP/1.1", 1)[0]) for one in said.split(b"\r\n\r\n")[1:]]
    assert found == sizes
