"""The whole command: start, banner, Ctrl-C, a dying engine, a port in use."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from server_harness import until

from ds_runtime import hookimpl
from ds_runtime.checkpoint.hub import EMBEDDED
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.description.hf import load_config
from ds_runtime.engine.process.transport import ipc
from ds_runtime.errors import CheckpointError, ConfigError, UnsupportedError
from ds_runtime.plugins import manager as plugins
from ds_runtime.server import front as front_module
from ds_runtime.server import serve as serve_module
from ds_runtime.server.front import add_routes, model_name
from ds_runtime.server.serve import listen

MAIN = Path(__file__).with_name("serve_main.py")


@contextlib.contextmanager
def started(folder, mode="works", port=0, **config):
    process = subprocess.Popen(
        [sys.executable, str(MAIN), str(folder), str(port), mode, json.dumps(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def read_until(process, pattern):
    """The match in the first line of standard output that has one."""
    for line in process.stdout:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern!r}: {process.stderr.read()}")


def read_errors(process, pattern):
    """The same in standard error."""
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern!r}")


def test_serves_and_ends_with_every_process_and_file(bpe_folder):
    with started(bpe_folder) as process:
        folder = Path(read_until(process, r"folder (.*)")[1])
        engine = psutil.Process(int(read_until(process, r"engine (\d+)")[1]))
        assert folder.stat().st_mode & 0o777 == 0o700
        read_until(process, "fake engine ready")
        line = read_until(process, r"serving (\S+) at (http://\S+)")
        assert line[1] == bpe_folder.name
        with httpx.Client(base_url=line[2], timeout=20) as http:
            assert http.get("/health").status_code == 200
            body = {"messages": [{"role": "user", "content": "[go on ]"}], "stream": True}
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                read_errors(process, "shutting down: 1 requests may take 20 s more")
                process.send_signal(signal.SIGINT)
                rest = list(lines)
        assert process.wait(15) == 0, "and not after 20 s"
        assert '"code":"shutting_down"' in "".join(rest)
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        assert not folder.exists()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("mode", ["loads", "stubborn"])
def test_sigterm_while_loading_and_with_a_stubborn_engine(bpe_folder, mode):
    with started(bpe_folder, mode) as process:
        folder = Path(read_until(process, r"folder (.*)")[1])
        engine = psutil.Process(int(read_until(process, r"engine (\d+)")[1]))
        if mode == "stubborn":
            read_until(process, "serving")
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json: not found; --model takes a folder with config.json"),
        ("{broken", "is not valid JSON"),
        ('{"architectures": ["MistralForCausalLM"]}', "MistralForCausalLM"),
        ('{"architectures": ["LlamaForCausalLM"]}', "LlamaForCausalLM"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_so_first(tmp_path, config, said):
    """Before it lacks a tokenizer, as `plan` says it."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with started(tmp_path) as process:
        assert process.wait(30) == 2
        err = process.stderr.read().splitlines()[-1]  # the harness's engine has its own before
    assert said in err and "no tokenizer.json" not in err
    with pytest.raises((CheckpointError, UnsupportedError)) as raised:
        load_config(tmp_path)
    assert err.endswith(str(raised.value))


class Told:
    """An engine that notes what is asked of it; a second signal comes while it stops."""

    to_engine = from_engine = "ipc://nobody"

    def __init__(self, again):
        self.again, self.said = again, []

    def start(self):
        self.said.append("start")

    def stop(self, timeout):
        signal.raise_signal(self.again)
        self.said.append(f"stop {timeout}")


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "moment",
    ["as it is made", "before it handles signals", "a library swallows", "a library converts"],
)
def test_a_signal_before_the_server_handles_it_ends_the_engines(
    bpe_folder, monkeypatch, moment, number, again
):
    """Whose processes ignore SIGTERM: left alone, they would wait for this one, and it for them."""
    engines = [Told(again), Told(again)]

    def front_end(*given):
        if moment == "before it handles signals":
            return lambda: signal.raise_signal(number)
        try:
            signal.raise_signal(number)
        except BaseException as e:
            if moment == "a library converts":  # as pydantic does where it makes a schema
                raise ValueError(f"made of {e!r}") from None
            if moment == "as it is made":
                raise
        return lambda: pytest.fail("it serves")

    monkeypatch.setattr(front_module, "front_end", front_end)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    raised = KeyboardInterrupt if number == signal.SIGINT else SystemExit
    try:
        with pytest.raises(raised):
            serve_module.serve(
                EngineConfig(model=str(bpe_folder), dp=2),
                ServerConfig(port=0),
                launch=lambda config, folder, explicit, replica: engines[replica],
            )
        after = signal.getsignal(signal.SIGINT)
        assert after is before[signal.SIGINT], "whoever called may wait for Ctrl-C"
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert [one.said for one in engines] == [["start", "stop 0.0"]] * 2


@pytest.mark.parametrize(
    "host",
    [
        *("no.such.invalid", " ", "a" * 64, "a..b", "..", "ex ample", "ü" * 70),
        *("http://127.0.0.1", "127.0.0.1:80", "[::1]", "999.1.1.1"),
    ],
)
def test_what_is_no_host_of_this_machine_is_said(host):
    with pytest.raises(ConfigError) as caught:
        listen(host, 0)
    assert str(caught.value).startswith(f"--host {host}: ")
    assert str(caught.value).endswith("; give an address of this machine")


def test_an_engine_that_does_not_start_gives_its_reason(bpe_folder):
    with started(bpe_folder, "fails") as process:
        assert process.wait(10) == 1
        said = process.stderr.read()
        assert re.fullmatch(
            r"\S+ \S+ ERROR server\.serve the engine did not start: "
            r"engine rank 0 left with exit code 3\n",
            said,
        )


def test_an_engine_that_dies_later(bpe_folder):
    with started(bpe_folder, on_engine_death="exit") as process:
        engine = psutil.Process(int(read_until(process, r"engine (\d+)")[1]))
        url = read_until(process, r"serving \S+ at (http://\S+)")[1]
        body = {"messages": [{"role": "user", "content": "[go on ]"}], "stream": True}
        with httpx.Client(base_url=url, timeout=5) as http:
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                engine.kill()
                assert "; the server exits" in "".join(lines)
            until(lambda: http.get("/health").status_code == 503)
            assert http.get("/health").json()["status"] == "dead"
            assert "exit code -9" in http.get("/health").json()["reason"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) in (0, 1)
        assert "the engine has stopped: engine rank 0 left with exit code -9" in (
            process.stderr.read()
        )


class Silent:
    """An engine that loads for ever."""

    def __init__(self, folder, made):
        self.to_engine, self.from_engine = ipc(folder, "to_engine"), ipc(folder, "from_engine")
        self.calls = []
        made.append(self)

    def start(self):
        self.calls.append("start")

    def poll(self):
        return None

    def stop(self, timeout=5.0):
        self.calls.append("stop")


@pytest.mark.parametrize("fault", [None, OSError("no more files")])
def test_the_end_of_the_web_server_is_an_end_and_restarts_no_engine(
    bpe_folder, monkeypatch, capfd, fault
):
    class Ended:
        async def serve(self, sockets):
            if fault is not None:
                raise fault

    made = []
    monkeypatch.setattr(front_module, "web", lambda *args, **kwargs: Ended())

    def run():
        return serve_module.serve(
            EngineConfig(model=str(bpe_folder)),
            ServerConfig(port=0),
            launch=lambda config, folder, explicit, n: Silent(folder, made),
        )

    if fault is None:
        assert run() == 1
    else:
        with pytest.raises(OSError, match="no more files"):
            run()
    assert [engine.calls for engine in made] == [["start", "stop"]]
    assert "the HTTP server has ended; the engines are stopped" in capfd.readouterr().err


def test_a_port_in_use_is_found_before_anything_starts(bpe_folder):
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(bpe_folder, port=port) as process:
            assert process.wait(10) == 2
            assert f"ConfigError: port {port} on 127.0.0.1 is in use" in (
                said := process.stderr.read()
            )
            assert "--port N" in said
            assert process.stdout.read() == ""


def test_listen():
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"on 203\.0\.113\.7 cannot be used: .*--host or --port"):
        listen("203.0.113.7", 0)
    if socket.has_ipv6:
        with contextlib.suppress(ConfigError), contextlib.closing(listen("::1", 0)) as sock:
            assert sock.family == socket.AF_INET6


def test_model_name(tmp_path):
    (tmp_path / "v2-lite").mkdir()
    assert model_name(str(tmp_path / "v2-lite") + "/") == "v2-lite"
    assert [model_name(m) for m in EMBEDDED] == [*EMBEDDED]
    assert model_name("deepseek-ai/DeepSeek-V2-Lite") == "deepseek-ai/DeepSeek-V2-Lite"


def test_routes_of_unknown_plugins_are_refused():
    with pytest.raises(ConfigError, match="--routes nothing: no such plugin brings routes"):
        add_routes(None, None, EngineConfig(), ("nothing",))


@pytest.fixture
def plugin(monkeypatch):
    """A module with the ds_routes hook, loaded beside the installed plugins."""
    module = types.ModuleType("routed")
    module.fail, module.answer = False, None

    @hookimpl
    def ds_routes(app, engine):
        if module.fail:
            raise RuntimeError("no route today")
        app.get("/hello")(lambda: engine)
        return module.answer

    module.ds_routes = ds_routes
    monkeypatch.setattr(plugins, "load_plugins", partial(plugins.load_plugins, extra=[module]))
    return module


def test_routes_of_a_named_plugin_and_of_no_other(plugin):
    app = FastAPI()
    add_routes(app, "the client", EngineConfig(), ())
    assert TestClient(app).get("/hello").status_code == 404
    add_routes(app, "the client", EngineConfig(), ("routed",))
    assert TestClient(app).get("/hello").json() == "the client"


def test_a_plugin_whose_routes_fail_stops_the_start(plugin):
    plugin.fail = True
    with pytest.raises(ConfigError, match=r"--routes routed: .*no route today"):
        add_routes(FastAPI(), None, EngineConfig(), ("routed",))


@pytest.mark.parametrize("answer", ["needs a licence: set ACME_LICENCE", 7, ["/hello"]])
def test_an_answer_of_routes_stops_the_start(plugin, answer):
    plugin.answer = answer
    said = answer if isinstance(answer, str) else f"its ds_routes returned {answer!r}, not None or"
    with pytest.raises(ConfigError, match=re.escape(f"--routes routed: {said}")):
        add_routes(FastAPI(), None, EngineConfig(), ("routed",))


def test_the_front_end_does_not_load_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ds_runtime.server.serve, ds_runtime.text.formats.template"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
