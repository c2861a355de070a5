"""`jaxkv serve`: the engine and its HTTP server as one process, until it is told to stop; other hosts follow it."""

import contextlib
import errno
import functools
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from jaxkv.errors import BadValue, JaxkvError, first_line
from jaxkv.serving.engine import Engine
from jaxkv.serving.http import DEFAULT, LOOPBACK, Limits, Server

LAST = 10  # seconds for the engine's last turn behind the grace, and to say what it has ended


def serve(
    engine: Engine,
    model: str,
    *,
    host: str = "127.0.0.1",
    host_names: tuple[str, ...] = (),
    port: int = 8000,
    token: str | None = None,
    limits: Limits = DEFAULT,
    grace: float = 60.0,
    connections: int | None = None,
    listens: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM; then take no more, finish what runs within `grace` seconds, and end.

    On the loopback it answers to the loopback's names and `host_names`; elsewhere to any, unless there are such names.
    `listens` is told the address when it is bound: with port 0, by the port that was free.
    On many hosts process 0 does so, and the others run what it says until it ends: these signals do not end them.
    Raises `BadValue` as `check` and `check_free` do; `JaxkvError` where the engine cannot start, or fails, and on the
    other hosts `HostFailure`.
    """
    check(port=port, token=token, grace=grace)
    if not engine.leads:
        with _unmoved():
            engine.follow()
        return
    check_free(host, port)
    names = (*LOOPBACK, *host_names) if host in LOOPBACK or host_names else None
    app = Server(engine, model, limits=limits, token=token).app(names, grace)
    load = engine.load
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=15,
        timeout_graceful_shutdown=math.ceil(grace) + LAST,
        limit_concurrency=connections or 4 * load.rows + engine.queue + 256,
        h11_max_incomplete_event_size=64 * 1024, http="h11", ws="none",
    )  # fmt: skip
    try:
        Stopped(config, engine, grace, listens).run()
    finally:
        engine.stop(finish=False)  # the other hosts too, where the server did not even begin
    if engine.failure is not None:
        raise JaxkvError(
            f"the engine failed ({type(engine.failure).__name__}: {first_line(engine.failure)}), and the server has "
            "ended: start it again; where memory was short, with fewer rows or a smaller budget"
        ) from engine.failure


def check(*, port: int, token: str | None, grace: float) -> None:
    """Raises `BadValue` for a port beyond 65535, a token that is empty, and a grace below 0 seconds."""
    if not 0 <= port <= 65535:
        raise BadValue(f"port={port}: expected 0 (any that is free) to 65535")
    if token is not None and not token.strip():
        raise BadValue(
            f"token={token!r} (--token, or $JAXKV_TOKEN): expected a text that is not empty, or none at all, and then "
            "whoever reaches the server may ask"
        )
    if not 0 <= grace < math.inf:
        raise BadValue(f"grace={grace:g}: expected 0 seconds or more, and a finite number")


def check_free(host: str, port: int) -> None:
    """Raises `BadValue` for an address that is not this machine's, and for a port of it that is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        errors = [error for family, *_, address in found if (error := _refusal(family, address)) is not None]
    except OSError as error:
        errors, found = [error], []
    taken = [error for error in errors if error.errno == errno.EADDRINUSE]
    if taken or len(errors) >= max(len(found), 1):
        raise BadValue(
            f"host={host!r}, port={port}: {os.strerror(errno.EADDRINUSE) if taken else errors[0]}; expected an address "
            "of this machine and a free port: give another --port (0: any that is free) or --host"
        )


def url(host: str, port: int) -> str:
    """The address as a browser takes it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _refusal(family: int, address: tuple) -> OSError | None:
    """Why a server could not listen there."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's own
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        return error
    return None


@contextlib.contextmanager
def _unmoved() -> Iterator[None]:
    """SIGINT and SIGTERM, which often come to all hosts at once, do nothing."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped(uvicorn.Server):
    """A server for which being told to stop is the ordinary end, after which the process goes on. It ends as well when
    its engine has failed."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, listens: Callable[[str], None] | None):
        super().__init__(config)
        self._engine, self._grace, self._listens = engine, grace, listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then the address is told."""
        await super().startup(sockets)
        if self._listens is not None:
            ports = {each.getsockname()[1]: None for server in self.servers for each in server.sockets}
            self._listens(" and ".join(url(self.config.host, port) for port in ports))

    async def on_tick(self, counter: int) -> bool:
        """As uvicorn's: whether to end, asked again and again."""
        return await super().on_tick(counter) or self._engine.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with the engine's stop beside it: an answer that this ends is still told so, while behind
        uvicorn's it would be cut off."""
        stop = functools.partial(self._engine.stop, timeout=self._grace)
        threading.Thread(target=stop, name="jaxkv-stop", daemon=True).start()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signals are not raised again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
