"""`ds-runtime chat` against a server over HTTP: on a terminal (a pty), in a pipe, in trouble."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
from server_harness import serving

from ds_runtime.cli.run.chat import Chat, Screen
from ds_runtime.cli.run.remote import Remote, RemoteError
from ds_runtime.errors import ConfigError
from ds_runtime.text.parsers.registry import Parsers

COMMAND = [sys.executable, "-m", "ds_runtime", "chat"]
CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@pytest.fixture(scope="module")
def calling(bpe_folder):
    with serving(bpe_folder, parsers=Parsers(None, "deepseekv31")) as one:
        yield one


def piped(url, *arguments, text=None):
    """(status, standard output, standard error) where neither end is a terminal."""
    command = [*COMMAND, "--base-url", url, *arguments]
    source = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **source
    )
    return done.returncode, done.stdout, done.stderr


class Terminal:
    """A `ds-runtime chat` on a pseudo-terminal: what it has shown, and keys for it."""

    def __init__(self, master):
        self.master, self.shown = master, ""

    def wait(self, pattern, seconds=30):
        """Read until the pattern was shown since the last wait; what came up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], self.shown
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        said, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return said.replace("\r", "")

    def type(self, text):
        os.write(self.master, text.encode())


@contextlib.contextmanager
def terminal(url, *arguments):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--base-url", url, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: os.login_tty(slave),
    )
    os.close(slave)
    try:
        yield Terminal(master), process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_conversation_on_a_terminal(calling, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    with terminal(calling.url, "--tools", str(tools), "--seed", "5") as (screen, process):
        screen.wait("fake at http.*/help tells the commands")
        screen.wait("> ")
        screen.type("[say <think>so so</think>yes]\n")
        said = screen.wait("> $")
        assert f"{DIM}so so" in said, "thinking is dimmed"
        assert re.search(r"so so\n?\x1b\[0m\n?yes", said)
        screen.type(f"[say {CALL}]\n")
        assert '[calls get_weather] {"city": "Rome"}' in screen.wait("> $")

        screen.type("[go on and ]\n")
        screen.wait("on and on and")
        screen.type("\x03")  # Ctrl-C stops the answer and nothing else
        screen.wait(r"\(stopped\)")
        screen.wait("> $")
        assert calling.wait_aborted()
        screen.type("\x03")
        screen.wait("Ctrl-D leaves")

        screen.type("/params temperature=0.5 seed= max_tokens=9\n")
        screen.wait("temperature=0.5 max_tokens=9")
        screen.type("/system be [brief]\n")
        screen.wait("system message: be")
        screen.type("/nonsense\n")
        screen.wait("no such command; /help lists them")
        screen.type("/params depth=3\n")
        screen.wait("known are temperature")
        screen.type("/reset\n")
        screen.wait("is forgotten")
        screen.type("two \\\nlines [say ok]\n")
        screen.wait(r"(?<!say )ok\W")  # the answer, not what was typed
        screen.wait("> $")
        last = calling.engine.submits[-1]
        prompt = calling.tokenizer.decode(last.prompt, skip_special=False)
        assert "be [brief]" in prompt and "two \nlines" in prompt
        assert "on and on" not in prompt and "so so" not in prompt, "the old talk is forgotten"
        assert last.params.temperature == 0.5 and last.params.max_tokens == 9
        screen.type("[full]\n")
        screen.wait("error: .*1024 requests")
        screen.type("/retry\n")  # the message that was refused, not the one before
        screen.wait("error: .*1024 requests")
        screen.type("and [say fine]\n")
        screen.wait(r"fine\W")
        screen.wait("> $")
        screen.type("/retry\n")
        screen.wait(r"fine\W")
        screen.type("/quit\n")
        assert process.wait(20) == 0


def test_a_pipe_gets_the_answer_alone(calling):
    status, out, err = piped(calling.url, text="[say <think>hidden</think>plain 你好]")
    assert (status, out, err) == (0, "plain 你好\n", "")
    status, out, err = piped(calling.url, "--thinking", "[say <think>seen</think>plain]")
    assert (status, out, err) == (0, "seen\nplain\n", "")


def test_errors_say_what_to_do(bpe_folder):
    with serving(bpe_folder, api_key=("k",), template=False) as served:
        status, out, err = piped(served.url, "hello")
        assert (status, out) == (1, "") and err.endswith("; pass --api-key KEY\n")
        status, out, err = piped(served.url + "/v1/", "--api-key", "k", "hello")
        assert (status, out) == (1, "") and "--chat-template FILE" in err and "Trace" not in err
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{sock.getsockname()[1]}"
    status, out, err = piped(nowhere, "hello")
    assert (status, out) == (1, "") and "start a server (ds-runtime serve)" in err


@contextlib.contextmanager
def scripted(*answers):
    """A server that gives each connection the next of these bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for answer in answers:
                peer, _ = server.accept()
                with peer, peer.makefile("rb") as asked:
                    # The whole request is read: closing before would be a reset, not an end.
                    lines = list(iter(asked.readline, b"\r\n"))
                    sizes = [n.split(b":")[1] for n in lines if n.lower().startswith(b"content-l")]
                    asked.read(int(sizes[0]) if sizes else 0)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def events(*chunks):
    data = b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + data


def delta(**fields):
    return {"choices": [{"delta": fields}]}


@pytest.mark.parametrize(
    "chunk",
    [5, [], {"choices": 1}, {"choices": ["x"]}, delta(content=5), delta(tool_calls=["x"])],
)
def test_a_server_that_sends_something_else(chunk):
    with scripted(events(delta(content="so "), chunk)) as url:
        said = []
        with pytest.raises(RemoteError, match="which is no chunk of a chat"):
            said.extend(Remote(url, None).stream({}))
    assert said == [delta(content="so ")]


def test_a_list_of_models_that_breaks_off_and_a_key_that_is_none():
    short = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"
    with scripted(short) as url, pytest.raises(RemoteError, match="/v1/models broke off"):
        Remote(url, None).model()
    with pytest.raises(ConfigError, match="--api-key: must be printable"):
        Remote(url, "a\r\nb")


def test_a_question_that_got_no_answer_can_be_asked_again(capsys):
    broken, ok = events(), events(delta(content="fine")) + b"data: [DONE]\n\n"
    with scripted(ok, broken, ok) as url:
        chat = Chat(Remote(url, None), "m", Screen(terminal=False, thinking=False))
        assert chat.answer("one")
        with pytest.raises(RemoteError, match="the connection ended before the answer did"):
            chat.answer("two")
        chat.command("/retry")
    assert [m["content"] for m in chat.history] == ["one", "fine", "two", "fine"]
    assert capsys.readouterr().out == "fine\nfine\n"


def test_answers_give_the_terminal_no_commands(capsys):
    Screen(terminal=True, thinking=True).show("a\x1b]0;owned\x07\x9b2J\ud800\tb\r\n")
    assert capsys.readouterr().out == "a\\x1b]0;owned\\x07\\x9b2J\\ud800\tb\n"
    Screen(terminal=False, thinking=True).show("a\x1b[0m")
    assert capsys.readouterr().out == "a\x1b[0m", "a pipe gets what was said"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:3000", "ftp://x", "http://", "http://x:port", "http://x?q"]
)
def test_a_base_url_that_is_none(url):
    with pytest.raises(ConfigError, match="--base-url"):
        Remote(url, None)
