"""`ds-runtime serve`: the engine's processes and the HTTP server, started and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.engine.transport import private_folder
from ds_runtime.errors import ConfigError
from ds_runtime.model.hub import resolve_model
from ds_runtime.server.app import create_app
from ds_runtime.server.client import EngineClient
from ds_runtime.server.prepare import ModelInfo
from ds_runtime.server.sampling import GenerationDefaults
from ds_runtime.text.template import load_template
from ds_runtime.text.tokenizer import Tokenizer

_POLL_SECONDS = 0.1
_LAST_WORDS = 0.5  # seconds for a dying engine's own message to arrive before poll's reason counts
_DEAD_SECONDS = 10.0  # /health tells the reason for so long before the server leaves
_GRACE_SECONDS = 1.5  # for open answers at shutdown; with the engine's share it stays below 5
_ENGINE_SECONDS = 2.0


class Engine(Protocol):
    """The engine's processes, as `engine.launch.EngineProcesses` runs them."""

    to_engine: str
    from_engine: str

    def start(self) -> None:
        """Start the processes; they answer with Ready or Dead."""
        ...

    def poll(self) -> str | None:
        """Why a process ended, or None while all live."""
        ...

    def stop(self, timeout: float = ...) -> None:
        """End every process within `timeout` seconds."""
        ...


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
    with contextlib.closing(listen(server_config.host, server_config.port)) as sock:
        folder = resolve_model(engine_config.model)
        tokenizer = Tokenizer.load(folder)
        model = ModelInfo(
            server_config.served_model_name or model_name(engine_config.model),
            load_template(folder, tokenizer, engine_config.chat_template),
            GenerationDefaults.load(folder),
        )
        with private_folder() as sockets:
            engine = start(engine_config, sockets, explicit)
            client = EngineClient(engine.to_engine, engine.from_engine)
            app = create_app(client, tokenizer, server_config, model)
            add_routes(app, client, engine_config, server_config.routes)
            return asyncio.run(_Serving(engine, client, app, sock, model.name).run())


def _processes(config: EngineConfig, folder: Path, explicit: Collection[str]) -> Engine:
    from ds_runtime.engine.launch import EngineProcesses

    return EngineProcesses(config, folder, explicit)


def model_name(model: str) -> str:
    """The name in the API: a folder's own name; a hub id or 'demo' as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if model != "demo" and path.is_dir() else model


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError with the remedy when the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"--host {host}: {e.strerror}; give an address of this machine") from e
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
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

    plugins = load_plugins(config.plugins)
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


class _Web(uvicorn.Server):
    """uvicorn, with the signals left to `_Serving`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: uvicorn would raise the signal again before the engine is stopped."""
        yield


class _Serving:
    """One run of the server, from the engine's start to everybody's end."""

    def __init__(
        self, engine: Engine, client: EngineClient, app: FastAPI, sock: socket.socket, name: str
    ) -> None:
        self._engine, self._client, self._sock, self._name = engine, client, sock, name
        self._web = _Web(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=60,
                timeout_graceful_shutdown=int(_GRACE_SECONDS) or 1,
            )
        )
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        """The exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        await self._client.start()
        tasks = []
        try:
            self._engine.start()
            web = asyncio.create_task(self._web.serve(sockets=[self._sock]))
            tasks = [web, asyncio.create_task(self._watch())]
            return await self._until_the_end(web)
        finally:
            self._client.fail("the server is shutting down")
            self._web.should_exit = True
            if tasks:
                tasks[1].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._client.close()
            self._engine.stop(_ENGINE_SECONDS)

    async def _until_the_end(self, web: asyncio.Task[None]) -> int:
        await self._first(web, asyncio.ensure_future(self._client.wait()))
        if self._signalled.is_set():
            return 0
        if self._client.dead is not None:
            print(f"the engine did not start: {self._client.dead}", file=sys.stderr, flush=True)
            return 1
        assert self._client.ready is not None
        print(self._client.ready.banner)
        print(f"serving {self._name} at {self._url()} (OpenAI base URL {self._url()}/v1)")
        sys.stdout.flush()
        await self._first(web, asyncio.ensure_future(self._client.wait_dead()))
        if self._signalled.is_set():
            return 0
        print(f"the engine has stopped: {self._client.dead}", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), _DEAD_SECONDS)
        return 1

    async def _first(self, web: asyncio.Task[None], event: asyncio.Future[None]) -> None:
        """Until the event, a signal, or the web server's own end, which is an error."""
        signalled = asyncio.ensure_future(self._signalled.wait())
        waited: set[asyncio.Future[Any]] = {web, event, signalled}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        event.cancel()
        signalled.cancel()
        if web.done() and not self._signalled.is_set():
            self._client.fail("the HTTP server ended")
            web.result()

    async def _watch(self) -> None:
        """Turns the end of a process into the client's reason."""
        while (reason := self._engine.poll()) is None:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_LAST_WORDS)
        self._client.fail(reason)

    def _on_signal(self) -> None:
        if self._signalled.is_set():
            self._web.force_exit = True
        self._signalled.set()

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
