"""The HTTP front end of engines: what they are asked through, and its run from first to last."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI

from ds_runtime.checkpoint.base import part_of
from ds_runtime.checkpoint.hub import EMBEDDED, text_folder
from ds_runtime.config import EngineConfig, ServerConfig
from ds_runtime.description.adapter import AdapterSpec
from ds_runtime.description.hf import load_config
from ds_runtime.errors import ConfigError
from ds_runtime.kv.tiers.disk import seconds_to_close
from ds_runtime.plugins.routes import RoutedEngine
from ds_runtime.server.app import create_app
from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.plugin_routes import ServedEngine
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.engines.restarts import Lives
from ds_runtime.server.engines.supervisor import End, Keeper
from ds_runtime.server.generate.prepare import ModelInfo, Service
from ds_runtime.server.generate.sampling import GenerationDefaults
from ds_runtime.server.http.guard import loopback
from ds_runtime.server.http.web import web
from ds_runtime.server.observe.tracing import Tracing, start_tracing
from ds_runtime.text.apart import Text
from ds_runtime.text.formats.families import find_family
from ds_runtime.text.parsers.registry import choose_parsers

_log = logging.getLogger(f"{__package__}.serve")  # the verb that an operator knows
_THREADS = 64  # that work on bodies; most of them wait for the text process
_POLL_SECONDS = 0.1
_SWITCH_SECONDS = 0.0005  # that a thread which reads a body lets the event loop wait
_DEAD_SECONDS = 10.0  # /health tells the reason for so long before the server leaves
_NODE_SECONDS = 1.0  # where other nodes have gone, and all are to be started anew
_GRACE_SECONDS = 1.5  # for answers' last bytes; with the engine's share it stays below 5


def front_end(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    folder: Path,
    lives: Sequence[Lives],
    sock: socket.socket,
    closed: contextlib.ExitStack,
) -> Callable[[], int]:
    """Returns what serves until the end, and returns the exit status. folder: the checkpoint;
    lives: of each replica; sock: listens; closed: closes what this opens.

    Raises ConfigError and CheckpointError for what cannot be served.
    """
    _warn_open(server_config, sock)
    name = engine_config.model
    where = text_folder(folder, engine_config.load_format)
    if not part_of(where, "tokenizer.json").exists():
        load_config(folder)  # a folder that is no checkpoint says so before it lacks a tokenizer
    text = closed.enter_context(
        contextlib.closing(Text(where, folder, name, engine_config.chat_template))
    )
    tokenizer, template, family = text.tokenizer, text.template, find_family(folder, name)
    parsers = choose_parsers(
        server_config.reasoning_parser,
        server_config.tool_call_parser,
        (family.reasoning if family else None, template.tool_calls if template else None),
        server_config.unknown_tools == "drop",
    )
    model = ModelInfo(
        server_config.served_model_name or model_name(name),
        str(folder),
        template,
        GenerationDefaults.load(folder),
        parsers,
        text_ended=lambda: text.ended,
    )
    _check_names(engine_config, model.name)
    tell: list[Tracing] = []
    if server_config.otlp_endpoint is not None:
        tell = [start_tracing(server_config.otlp_endpoint, model.name)]
        closed.enter_context(contextlib.closing(tell[0]))
    think_id = tokenizer.token_id("<think>") if server_config.strip_thinking_cache else None
    engines = [one.engine for one in lives]
    client = Replicas([EngineClient(e.to_engine, e.from_engine, think_id) for e in engines])
    app = create_app(client, tokenizer, server_config, model, tell)
    text.aside = app.state.bodies.aside
    add_routes(app, ServedEngine(app.state.service), engine_config, server_config.routes)
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()  # full collections stay frequent: refused and abandoned requests leave cycles
    serving = _Serving(lives, app, sock, engine_config, text.close)
    return lambda: uvloop.run(serving.run())


def _check_names(config: EngineConfig, served: str) -> None:
    for spec in map(AdapterSpec.parse, config.lora):
        if spec.name == served:
            raise ConfigError(
                f"--lora {served}: is the model's own name; choose another, or --served-model-name"
            )


def model_name(model: str) -> str:
    """The name in the API: a folder's own name; a hub id or an embedded model as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if model not in EMBEDDED and path.is_dir() else model


def _warn_open(config: ServerConfig, sock: socket.socket) -> None:
    """Where there is no key, say who can use the server."""
    if config.api_key or config.api_key_file is not None:
        return
    address = sock.getsockname()[0]
    if not loopback(address):
        _log.warning(
            "%s is open to everybody who reaches this machine: give --api-key or --api-key-file, "
            "or listen on 127.0.0.1",
            address,
        )
    if "*" in config.cors_origins:
        _log.warning(
            "%s is open to everybody whose page a browser on this machine shows "
            "(--cors-origins '*'): name the origins, or give --api-key or --api-key-file",
            address,
        )


def add_routes(
    app: FastAPI, engine: RoutedEngine, config: EngineConfig, names: Collection[str]
) -> None:
    """The HTTP routes of the plugins that the operator named, and of no other."""
    if not names:
        return
    from ds_runtime.plugins.manager import load_plugins

    plugins = load_plugins(config.plugins, allowlist=config.plugin_allowlist)
    offering = plugins.implementing("ds_routes")
    for name in names:
        if name not in offering:
            raise ConfigError(
                f"--routes {name}: no such plugin brings routes; those that do: "
                f"{', '.join(offering) or 'none'}"
            )
        answers = plugins.call("ds_routes", only=name, app=app, engine=engine)
        said = [answer for _, answer in answers if answer is not None]
        if (refusal := plugins.reports[name].refusal) is not None:
            raise ConfigError(f"--routes {name}: {refusal.reason}; leave it out or mend the plugin")
        if said and isinstance(said[0], str):
            raise ConfigError(f"--routes {name}: {said[0]}")
        if said:
            raise ConfigError(
                f"--routes {name}: its ds_routes returned {said[0]!r}, not None or a sentence; "
                "leave it out or mend the plugin"
            )


class _Serving:
    """One run of the server, from the engines' start to everybody's end."""

    def __init__(
        self,
        lives: Sequence[Lives],
        app: FastAPI,
        sock: socket.socket,
        engine_config: EngineConfig,
        end_text: Callable[[], object],
    ) -> None:
        service: Service = app.state.service
        client, config = service.client, service.config
        self._client, self._name, self._running = client, service.model.name, service.running
        self._sock, self._end_text = sock, end_text
        several, writes = len(lives) > 1, seconds_to_close(engine_config)
        self._keepers = [
            Keeper(
                one,
                client.clients[n],
                f"replica {n}: " if several else "",
                config.watchdog_timeout,
                self._on_ready,
                writes,
            )
            for n, one in enumerate(lives)
        ]
        self._in_json = config.log_format == "json"
        self._scheme = "http" if config.ssl_certfile is None else "https"
        self._patience = config.shutdown_timeout
        self._telling = _DEAD_SECONDS if engine_config.nnodes == 1 else _NODE_SECONDS
        self._web = web(app, config, sock, grace=int(_GRACE_SECONDS) or 1)
        self._signalled, self._hurried = asyncio.Event(), asyncio.Event()

    async def run(self) -> int:
        """The exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "work"))
        await self._client.start()
        tasks: list[asyncio.Task[Any]] = []
        code = 1
        try:
            tasks += [asyncio.create_task(keeper.run()) for keeper in self._keepers]
            tasks.append(asyncio.create_task(self._web.serve(sockets=[self._sock])))
            code = await self._until_the_end(tasks[-1], tasks[:-1])
        finally:
            self._client.end()
            self._web.should_exit = True
            for keeping in tasks[:-1]:
                keeping.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._client.close()
            self._end_text()  # else the loop waits for threads that wait for it
            ended = await asyncio.gather(*(keeper.stop(self._hurried) for keeper in self._keepers))
        return code if all(ended) else 1

    async def _until_the_end(
        self, task: asyncio.Task[None], keeping: Sequence[asyncio.Task[End]]
    ) -> int:
        """Until a signal, an engine that is not started again, or the web server's own end."""
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({task, signalled, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if self._signalled.is_set():
            await self._drain()
            return 0
        if task.done():
            _log.error("the HTTP server has ended; the engines are stopped")
            task.result()
            return 1
        end = next(one.result() for one in keeping if one.done())
        if not end.served:
            _log.error("the engine did not start: %s", end.reason)
            return 1
        _log.error("the engine has stopped: %s; the server exits", end.reason)
        if self._client.serving:
            await self._drain()
        else:
            await self._signal_within(self._telling)
        return 1

    def _on_ready(self) -> None:
        """Say so, once every engine is there."""
        ready = self._client.ready
        if ready is None or len(self._client.serving) < len(self._keepers):
            return
        banner = ready.banner
        if len(self._keepers) > 1:
            banner += f"\nreplicas  {len(self._keepers)}, each as above"
        serving = f"serving {self._name} at {self._url()} (OpenAI base URL {self._url()}/v1)"
        if self._in_json:
            _log.info("%s\n%s", banner, serving)
        else:
            print(banner)
            print(serving)
        sys.stdout.flush()

    async def _drain(self) -> None:
        """Let running requests end; no longer than the user allows, nor than an engine serves."""
        self._client.drain()
        if running := len({*self._running.values()}):
            _log.warning(
                "shutting down: %d requests may take %g s more; a second signal stops at once",
                running,
                self._patience,
            )
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience
        while self._running and self._client.serving and loop.time() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), _POLL_SECONDS)
                return

    async def _signal_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), seconds)

    def _on_signal(self) -> None:
        if self._signalled.is_set():
            self._hurried.set()
            self._web.force_exit = True
        self._signalled.set()

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"
