"""Real uvicorn on a real port in front of the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from fake_engine import FakeEngine
from fastapi import FastAPI

from ds_runtime.config import ServerConfig
from ds_runtime.engine.process.transport import ipc, private_folder
from ds_runtime.server.app import create_app
from ds_runtime.server.engines.client import EngineClient
from ds_runtime.server.engines.replicas import Replicas
from ds_runtime.server.generate.prepare import ModelInfo
from ds_runtime.server.generate.sampling import GenerationDefaults
from ds_runtime.server.http.turns import Turns
from ds_runtime.server.http.web import web as make_web
from ds_runtime.server.serve import listen
from ds_runtime.text.formats.template import Template, load_template
from ds_runtime.text.parsers.registry import Parsers
from ds_runtime.text.tokenizer import Tokenizer


@dataclass
class Served:
    url: str
    engines: list[FakeEngine]
    http: httpx.Client
    tokenizer: Tokenizer
    app: FastAPI

    @property
    def engine(self):
        return self.engines[0]

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def chat(self, order, **body):
        messages = [{"role": "user", "content": order}]
        return self.post("/v1/chat/completions", messages=messages, **body)

    def wait_aborted(self, count=1):
        """The rids that the engine was told to abort, once there are `count`."""
        until(lambda: len(self.engine.aborted) >= count)
        return list(self.engine.aborted)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    template: Template | bool | None = True,  # the folder's, another, or none
    ready=True,
    routes_of=None,
    queue_limit=1024,
    parsers=None,
    send_buffer=None,
    tell=(),
    replicas=1,
    beside=(),
    turns=None,
    **config,
):
    tokenizer = Tokenizer.load(folder)
    server_config = ServerConfig(port=0, served_model_name="fake", **config)
    model = ModelInfo(
        "fake",
        str(folder),
        load_template(folder, tokenizer) if template is True else template or None,
        GenerationDefaults.load(folder),
        parsers or Parsers(),
    )
    with private_folder() as sockets, contextlib.closing(listen("127.0.0.1", 0)) as sock:
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        pairs = [[ipc(sockets, f"{way}{n}") for way in ("to", "from")] for n in range(replicas)]
        engines = [
            FakeEngine(tokenizer, *pair, ready=ready, queue_limit=queue_limit) for pair in pairs
        ]
        think_id = tokenizer.token_id("<think>") if server_config.strip_thinking_cache else None
        client = Replicas([EngineClient(*pair, think_id) for pair in pairs])
        for one in client.clients if turns is None else ():  # events as the engine's steps are
            one.turns = Turns(busy=lambda: 0.0)
        app = create_app(client, tokenizer, server_config, model, tell)
        if routes_of is not None:
            routes_of(app)
        web = make_web(app, server_config, sock, grace=1)

        async def main():
            await client.start()
            for engine in engines:
                engine.start()
            tasks = [asyncio.ensure_future(one()) for one in beside]  # on the same loop
            try:
                await web.serve(sockets=[sock])
            finally:
                client.close()
                for task in tasks:
                    task.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        scheme = "http" if server_config.ssl_certfile is None else "https"
        url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
        json = {"content-type": "application/json"}
        with httpx.Client(base_url=url, timeout=20, verify=False, headers=json) as http:
            if ready:
                until(lambda: http.get("/health").status_code == 200)
                until(lambda: len(client.serving) == replicas)
            yield Served(url, engines, http, tokenizer, app)
        for engine in engines:
            engine.alive = False
        web.should_exit = True
        thread.join(10)
        for engine in engines:
            engine.thread.join(10)
        assert not any(t.is_alive() for t in (thread, *(e.thread for e in engines)))
