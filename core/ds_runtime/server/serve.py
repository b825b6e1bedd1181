"""`ds-runtime serve`: the engine's processes and the HTTP server, started and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI

from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.errors import ConfigError
from ds_runtime.model.hub import resolve_model
from ds_runtime.model.peft import AdapterSpec
from ds_runtime.server.app import create_app
from ds_runtime.server.client import EngineClient
from ds_runtime.server.lives import Engine, Lives
from ds_runtime.server.log import logging_to
from ds_runtime.server.prepare import ModelInfo
from ds_runtime.server.sampling import GenerationDefaults
from ds_runtime.server.tracing import Tracing, start_tracing
from ds_runtime.server.web import web
from ds_runtime.text.families import find_family
from ds_runtime.text.parsers import choose_parsers
from ds_runtime.text.template import load_template
from ds_runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_LAST_WORDS = 0.5  # seconds for a dying engine's own message to arrive before poll's reason counts
_DEAD_SECONDS = 10.0  # /health tells the reason for so long before the server leaves
_GRACE_SECONDS = 1.5  # for answers' last bytes; with the engine's share it stays below 5
_ENGINE_SECONDS = 2.0
_AT_ONCE = 0.1  # the engine's share when a second signal has come


Launch = Callable[[EngineConfig, Path, Collection[str]], Engine]


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    explicit: Collection[str] = (),
    launch: Launch | None = None,
) -> int:
    """Serve until a signal (0) or the engine's end (1). `explicit`: fields the user set himself.

    Raises ConfigError for a port in use and CheckpointError for files that cannot be used, before
    anything is started.
    """
    start = _processes if launch is None else launch
    check_tls(server_config)
    address = server_config.host, server_config.port
    with contextlib.closing(listen(*address)) as sock, logging_to(server_config):
        folder = resolve_model(engine_config.model)
        tokenizer = Tokenizer.load(folder)
        family = find_family(folder, engine_config.model)
        template = load_template(folder, tokenizer, engine_config.chat_template, family)
        parsers = choose_parsers(
            server_config.reasoning_parser,
            server_config.tool_call_parser,
            (family.reasoning if family else None, template.tool_calls if template else None),
            server_config.unknown_tools == "drop",
        )
        model = ModelInfo(
            server_config.served_model_name or model_name(engine_config.model),
            str(folder),
            template,
            GenerationDefaults.load(folder),
            parsers,
        )
        _check_names(engine_config, model.name)
        lives = Lives(lambda folder: start(engine_config, folder, explicit), server_config)
        with contextlib.closing(lives), contextlib.ExitStack() as traced:
            tell: list[Tracing] = []
            if server_config.otlp_endpoint is not None:
                tell = [start_tracing(server_config.otlp_endpoint, model.name)]
                traced.enter_context(contextlib.closing(tell[0]))
            think_id = tokenizer.token_id("<think>") if server_config.strip_thinking_cache else None
            client = EngineClient(lives.engine.to_engine, lives.engine.from_engine, think_id)
            app = create_app(client, tokenizer, server_config, model, tell)
            add_routes(app, client, engine_config, server_config.routes)
            return uvloop.run(_Serving(lives, client, app, sock, server_config, model.name).run())


def _processes(config: EngineConfig, folder: Path, explicit: Collection[str]) -> Engine:
    from ds_runtime.engine.launch import EngineProcesses

    return EngineProcesses(config, folder, explicit)


def _check_names(config: EngineConfig, served: str) -> None:
    for spec in map(AdapterSpec.parse, config.lora):
        if spec.name == served:
            raise ConfigError(
                f"--lora {served}: is the model's own name; choose another, or --served-model-name"
            )


def model_name(model: str) -> str:
    """The name in the API: a folder's own name; a hub id or 'demo' as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if model != "demo" and path.is_dir() else model


def check_tls(config: ServerConfig) -> None:
    """ConfigError unless the TLS files, if there are any, can be used."""
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"--{name.replace('_', '-')} {path}: cannot be read")
    password = config.ssl_keyfile_password or ""  # never ask on a terminal
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: password)
    except (ssl.SSLError, OSError, ValueError) as e:
        key = config.ssl_keyfile or config.ssl_certfile
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with the key in {key}: {e}; both must be PEM, "
            "belong together, and --ssl-keyfile-password must open the key"
        ) from e


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError with the remedy when the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"--host {host}: {e.strerror}; give an address of this machine") from e
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:  # event loops switch Nagle's algorithm off only where the protocol is named
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            said = "is in use: stop the program that holds it, or pass --port N (0: any free one)"
        elif e.errno in (errno.EACCES, errno.EPERM):
            said = "may not be used by this user: pass a --port above 1023"
        else:
            said = f"cannot be used: {e.strerror}; pass another --host or --port"
        raise ConfigError(f"port {port} on {host} {said}") from e
    return sock


def add_routes(
    app: FastAPI, client: EngineClient, config: EngineConfig, names: Collection[str]
) -> None:
    """The HTTP routes of the plugins that the operator named, and of no other."""
    if not names:
        return
    from ds_runtime.plugins import load_plugins

    plugins = load_plugins(config.plugins, allowlist=config.plugin_allowlist)
    offering = plugins.implementing("ds_routes")
    for name in names:
        if name not in offering:
            raise ConfigError(
                f"--routes {name}: no such plugin brings routes; those that do: "
                f"{', '.join(offering) or 'none'}"
            )
        plugins.call("ds_routes", only=name, app=app, engine=client)
        refusal = plugins.reports[name].refusal
        if refusal is not None:
            raise ConfigError(f"--routes {name}: {refusal.reason}; leave it out or mend the plugin")


class _Serving:
    """One run of the server, from the engine's start to everybody's end."""

    def __init__(
        self,
        lives: Lives,
        client: EngineClient,
        app: FastAPI,
        sock: socket.socket,
        config: ServerConfig,
        name: str,
    ) -> None:
        self._lives, self._client, self._sock, self._name = lives, client, sock, name
        self._in_json = config.log_format == "json"
        self._scheme = "http" if config.ssl_certfile is None else "https"
        self._patience = config.shutdown_timeout
        self._running = app.state.service.running
        self._web = web(app, config, sock, grace=int(_GRACE_SECONDS) or 1)
        self._signalled, self._hurried = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        """The exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        await self._client.start()
        task: asyncio.Task[None] | None = None
        try:
            self._start()
            task = asyncio.create_task(self._web.serve(sockets=[self._sock]))
            return await self._until_the_end(task)
        finally:
            self._client.end()
            self._web.should_exit = True
            if task is not None:
                await asyncio.gather(task, return_exceptions=True)
            self._client.close()
            self._lives.engine.stop(_AT_ONCE if self._hurried.is_set() else _ENGINE_SECONDS)

    def _start(self) -> None:
        self._client.outlook = self._lives.outlook
        self._lives.engine.start()

    async def _until_the_end(self, task: asyncio.Task[None]) -> int:
        served = False
        while True:
            watch = asyncio.create_task(self._watch(self._lives.engine))
            try:
                await self._live(task)
            finally:
                watch.cancel()
            if self._signalled.is_set():
                return 0
            served = served or self._client.ready is not None
            if not served:
                _log.error("the engine did not start: %s", self._client.dead)
                return 1
            if not self._lives.may_go_on():
                self._client.restarting = None
                _log.error("the engine has stopped: %s; the server exits", self._client.dead)
                await self._signal_within(_DEAD_SECONDS)
                return 1
            await self._restart()
            if self._signalled.is_set():
                return 0

    async def _live(self, task: asyncio.Task[None]) -> None:
        """Until the engine is dead, or a signal and the end of what ran then."""
        await self._first(task, asyncio.ensure_future(self._client.wait()))
        if self._signalled.is_set() or self._client.dead is not None:
            return
        assert self._client.ready is not None
        self._lives.ready()
        self._client.restarting = None
        serving = f"serving {self._name} at {self._url()} (OpenAI base URL {self._url()}/v1)"
        if self._in_json:
            _log.info("%s\n%s", self._client.ready.banner, serving)
        else:
            print(self._client.ready.banner)
            print(serving)
        sys.stdout.flush()
        await self._first(task, asyncio.ensure_future(self._client.wait_dead()))
        if self._signalled.is_set():
            await self._drain()

    async def _restart(self) -> None:
        """Start the next engine after a while, unless a signal comes first."""
        delay = self._lives.delay()
        said = f"{self._client.dead}; {self._lives.plan()}"
        _log.error("the engine has stopped: %s in %g s", said, delay)
        self._client.restarting = said
        await asyncio.to_thread(self._lives.engine.stop, _ENGINE_SECONDS)
        await self._signal_within(delay)
        if not self._signalled.is_set():
            engine = self._lives.renew()
            self._client.renew(engine.to_engine, engine.from_engine)
            self._start()

    async def _drain(self) -> None:
        """Let running requests end; no longer than the user allows, nor than the engine lives."""
        self._client.draining = True
        if running := len(self._running):
            _log.warning(
                "shutting down: %d requests may take %g s more; a second signal stops at once",
                running,
                self._patience,
            )
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience
        while self._running and self._client.dead is None and loop.time() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), _POLL_SECONDS)
                return

    async def _signal_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), seconds)

    async def _first(self, task: asyncio.Task[None], event: asyncio.Future[None]) -> None:
        """Until the event, a signal, or the web server's own end, which is an error."""
        signalled = asyncio.ensure_future(self._signalled.wait())
        waited: set[asyncio.Future[Any]] = {task, event, signalled}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        event.cancel()
        signalled.cancel()
        if task.done() and not self._signalled.is_set():
            self._client.fail("the HTTP server ended")
            task.result()

    async def _watch(self, engine: Engine) -> None:
        """Turns the end of a process into the client's reason."""
        while (reason := engine.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_LAST_WORDS)
        self._client.fail(reason)

    def _on_signal(self) -> None:
        if self._signalled.is_set():
            self._hurried.set()
            self._web.force_exit = True
        self._signalled.set()

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"
