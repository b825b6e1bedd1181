"""`ds-runtime serve`: the engine's processes and the HTTP server, started and ended together."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from ds_runtime.checkpoint.hub import resolve_model
from ds_runtime.common import interrupt
from ds_runtime.config import MAX_ITL, EngineConfig, ServerConfig
from ds_runtime.engine.process.transport import private_folder
from ds_runtime.errors import ConfigError, unreadable
from ds_runtime.kv.tiers.disk import seconds_to_close
from ds_runtime.server.engines.restarts import Lives, RunningEngine
from ds_runtime.server.http.descriptors import check_limit, raise_limit
from ds_runtime.server.observe.log import engine_output, logging_to

_log = logging.getLogger(__name__)
_LET_GO = 5.0  # seconds for node 0 to end once its requests have

Launch = Callable[[EngineConfig, Path, Collection[str], int], RunningEngine]
"""Makes the engine with a number among the replicas, which is to use a folder."""


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    explicit: Collection[str] = (),
    launch: Launch | None = None,
) -> int:
    """Serve until a signal (0) or the engine's end (1). `explicit`: fields the user set himself.

    Raises ConfigError for a port in use and for too few files that may be open, before anything is
    started, and CheckpointError for files that cannot be used.
    """
    start = _launcher(server_config) if launch is None else launch
    if engine_config.max_itl is None and not engine_config.deterministic:
        engine_config = replace(engine_config, max_itl=MAX_ITL)
    if engine_config.nnodes > 1:  # whoever starts the nodes starts them anew, all of them
        server_config = replace(server_config, on_engine_death="exit")
    if engine_config.node_rank:
        return _headless(engine_config, server_config, explicit)
    check_tls(server_config)
    before, files = raise_limit()
    check_limit(engine_config)
    address = server_config.host, server_config.port
    with contextlib.ExitStack() as closed:
        sock = closed.enter_context(contextlib.closing(listen(*address)))
        closed.enter_context(logging_to(server_config))
        if files > before:
            _log.info("may open %d files at once, up from %d (ulimit -n)", files, before)
        folder = resolve_model(engine_config.model)
        lives: list[Lives] = []
        for number in range(engine_config.replicas):
            make = partial(_make, start, engine_config, explicit, number)
            lives.append(closed.enter_context(contextlib.closing(Lives(make, server_config))))
        with _started(lives) as check:  # the engines load while this process imports and reads
            from ds_runtime.server.front import front_end

            serving = front_end(engine_config, server_config, folder, lives, sock, closed)
            check()
            return serving()


@contextlib.contextmanager
def _started(lives: Sequence[Lives]) -> Iterator[Callable[[], None]]:
    """The engines start; they end where the block raises, as it does when a signal comes before the
    server handles it. More signals change nothing then.

    Yields what raises once more: a library may have caught what the signal raised in it, or have
    made an error of its own of it.
    """
    asked: list[BaseException] = []

    def leave(number: int, frame: object) -> NoReturn:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(0))
        raise asked[0]

    def check() -> None:
        if asked:
            raise asked[0]

    interrupted = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
        if interrupted is signal.default_int_handler:
            signal.signal(signal.SIGINT, leave)
    try:
        for one in lives:
            one.start()
        yield check
    except BaseException:
        with interrupt.ignored(signal.SIGTERM):
            for one in lives:
                one.abandon()
        check()
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is leave:  # whoever called may wait for Ctrl-C
            signal.signal(signal.SIGINT, interrupted)


def _headless(config: EngineConfig, server: ServerConfig, explicit: Collection[str]) -> int:
    """The ranks of a node that has no HTTP, until rank 0 lets them go (0) or they fail (1).

    A signal may have come to every node: rank 0 knows when requests have ended. After
    --shutdown-timeout and what its disk may take, or at the second signal, they leave.
    """
    from ds_runtime.engine.process.launch import EngineProcesses

    tell = engine_output if server.log_format == "json" else None
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            sys.exit(0)
        asked.set()

    with logging_to(server), private_folder() as folder:
        engine = EngineProcesses(config, folder, explicit, tell=tell)
        at = f"node {config.node_rank} of {config.nnodes}"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ask)
        try:
            engine.start()
            print(
                f"{at}: {len(engine.pids)} ranks for node 0 at {config.dist_init_addr}",
                flush=True,
            )
            while not engine.over.wait(0.25) and not asked.is_set():
                pass
            if asked.is_set():
                patience = server.shutdown_timeout + seconds_to_close(config) + _LET_GO
                print(f"{at}: waits up to {patience:g} s for node 0 to end; another signal ends it")
                sys.stdout.flush()
                engine.over.wait(patience)
        finally:
            with interrupt.ignored(signal.SIGTERM):
                engine.stop(0.0)
        if (reason := engine.poll()) is not None:
            print(f"ds-runtime: {at}: {reason}", file=sys.stderr, flush=True)
    return int(reason is not None)


def _launcher(server: ServerConfig) -> Launch:
    from ds_runtime.engine.process.launch import EngineProcesses

    tell = engine_output if server.log_format == "json" else None

    def launch(
        config: EngineConfig, folder: Path, explicit: Collection[str], replica: int
    ) -> RunningEngine:
        return EngineProcesses(config, folder, explicit, (), replica, tell)

    return launch


def _make(
    launch: Launch, config: EngineConfig, explicit: Collection[str], number: int, folder: Path
) -> RunningEngine:
    return launch(config, folder, explicit, number)


def check_tls(config: ServerConfig) -> None:
    """ConfigError unless the TLS files, if there are any, can be used."""
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        if path is None:
            continue
        try:
            open(path, "rb").close()
        except OSError as e:
            raise unreadable(f"--{name.replace('_', '-')} {path}", e, "a PEM file") from e
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
    except (OSError, UnicodeError) as e:  # the latter for parts of a name that none has
        why = e.strerror if isinstance(e, OSError) else "is no name of a host"
        raise ConfigError(f"--host {host}: {why}; give an address of this machine") from e
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
