"""The relay passes every byte on, and tells requests apart."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record import Request, _line, read, split, worth, write
from relay import Relay, Sent

SAID = b"HTTP/1.1 200 OK\r\ncontent-length: 26\r\n\r\n"
MADE = b'{"id":"resp_0a","x":12345}'


@pytest.fixture(scope="module")
def served():
    """An address that answers each head at once, whether or not the body is there."""
    with socket.create_server(("127.0.0.1", 0)) as own:

        def talk(one):
            with contextlib.suppress(OSError), one:
                while data := one.recv(1 << 16):
                    one.sendall((SAID + MADE) * data.count(b" HTTP/1.1\r\n"))

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=(own.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{own.getsockname()[1]}"
        own.shutdown(socket.SHUT_RDWR)


def receive(own, count):
    data = b""
    while len(data) < count:
        data += own.recv(1 << 16)
    return data


@settings(max_examples=25, deadline=None)
@given(bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=4), late=st.booleans())
def test_requests_are_kept_apart(served, bodies, late):
    relay = Relay(served)
    wanted = []
    try:
        where = urlsplit(relay.url)
        with socket.create_connection((where.hostname, where.port), timeout=10) as own:
            for number, body in enumerate(bodies):
                head = f"POST /{number} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                wanted.append(head + body)
                if late:  # the answer is there before the body
                    own.sendall(head)
                    assert receive(own, len(SAID + MADE)) == SAID + MADE
                    own.sendall(body)
                else:
                    own.sendall(head + body)
                    assert receive(own, len(SAID + MADE)) == SAID + MADE
            own.shutdown(socket.SHUT_WR)
            assert own.recv(1) == b""  # the server has had everything
    finally:
        relay.close()
    assert [bytes(one.raw) for one in relay.sent] == wanted
    assert all((one.status, one.made) == (200, "resp_0a") for one in relay.sent)


def test_what_is_kept():
    def sent(target, body=b"", use="x", made=None):
        head = f"POST {target} HTTP/1.1\r\nHost: h:{len(target)}\r\nA: b\r\n\r\n".encode()
        return Sent(use, bytearray(head + body), 200, made)

    first = sent("/v1/responses", b"1", made="resp_0a")
    names = sent("/v1/responses", b'"resp_0a"', made="resp_0b")
    many = [sent("/v1/chat/completions", b"%d" % i) for i in range(20)]
    kept = worth([first, first, names, names, *many, *many])
    assert [k.made for k in kept[:3]] == ["resp_0a", "resp_0a", None]  # an id anew each time
    assert [split(k.raw)[3] for k in kept[3:]] == [b"0", b"1", b"2", b"3", b"4", b"5"]


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=60), made=st.sampled_from([None, "resp_0a"]))
def test_bytes_come_back_from_the_file(tmp_path_factory, raw, made):
    import record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "FOLDER", tmp_path_factory.mktemp("recorded"))
        one = Request("use", raw, 200, made)
        write("client", [one, one])
        assert read("client") == [one, one]
        assert set(_line(one)) == {"use", "status", "sent"} | ({"made"} if made else set())
