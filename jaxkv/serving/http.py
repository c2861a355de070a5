"""The engine over HTTP: the OpenAI API's completions, the page to talk to it, health and metrics."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.checks import shown
from jaxkv.errors import BadValue, Busy, JaxkvError
from jaxkv.serving.answer import CANCELLED, FAILED, Answer
from jaxkv.serving.engine import Engine
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.wire import NAMES, Chat, Completion, Reader, Wanted, Written, Wrong, parsed

PAGE_RULES = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
GIVEN = re.compile(
    rf"\b({'|'.join(NAMES)})=(?! )"
)  # with a value, or last: "longest=, max_new_tokens= or" is an engine's
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may take: bytes of its body, seconds to send it, seconds in all; new tokens where it says none."""

    body: int = 2**20
    body_seconds: float = 30.0
    seconds: float = 600.0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 < value < math.inf:
                raise BadValue(f"{name}={value:g}: expected more than 0, and a finite number")


DEFAULT = Limits()


class Server:
    """The application on one engine, whose model it calls `model`; `token`: who asks must show it."""

    def __init__(self, engine: Engine, model: str, *, limits: Limits = DEFAULT, token: str | None = None):
        self.engine, self.model, self._limits, self._token = engine, model, limits, token
        self._metrics, self._ready = Metrics(engine), False

    def app(self, hosts: tuple[str, ...] | None = None, grace: float | None = None) -> Starlette:
        """The ASGI application: it starts the engine, and stops it when what runs has ended (or after `grace` s).

        `hosts`: the names under which it answers (None: any); the loopback's alone keep other sites' pages out.
        """

        @contextlib.asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            threading.Thread(target=self._start, daemon=True).start()
            yield
            await anyio.to_thread.run_sync(lambda: self.engine.stop(timeout=grace))

        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._models),
                Route("/v1/completions", self._answering(Completion), methods=["POST"]),
                Route("/v1/chat/completions", self._answering(Chat), methods=["POST"]),
            ],
            middleware=[] if hosts is None else [Middleware(Named, hosts=hosts)],
            exception_handlers={Wrong: _wrong, HTTPException: _http_error},
            lifespan=lifespan,
        )

    def _start(self) -> None:
        self.engine.start()
        self._ready = True

    # ---- routes

    async def _page(self, _: Request) -> Response:
        page = files("jaxkv.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"content-security-policy": PAGE_RULES, "x-frame-options": "DENY"})

    async def _health(self, _: Request) -> Response:
        if self.engine.failure is not None:
            return JSONResponse({"status": "failed", "error": type(self.engine.failure).__name__}, 503)
        return JSONResponse({"status": "ok"}) if self._ready else JSONResponse({"status": "starting"}, 503)

    async def _show_metrics(self, request: Request) -> Response:
        self._check_token(request)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        self._check_token(request)
        one = request.path_params.get("model")
        if one is not None and one != self.model:
            raise self._unknown(one)
        policy, load = self.engine.policy, self.engine.load
        about = {
            "id": self.model, "object": "model", "created": 0, "owned_by": "jaxkv", "policy": policy.name,
            "budget": policy.budget, "ratio": policy.ratio, "rows": load.rows, "prefixes": self.engine.prefixes,
            "cache_bytes_per_row": self.engine.nbytes // load.rows,
            "context": self.engine.params.config.max_position if policy.bound_to_text else None,
        }  # fmt: skip
        return JSONResponse(about if one is not None else {"object": "list", "data": [about]})

    def _answering(self, kind: type[Wanted]) -> Callable[[Request], Any]:
        async def answering(request: Request) -> Response:
            self._check_token(request)
            wanted = parsed(kind, await self._body(request))
            if wanted.model is not None and wanted.model != self.model:
                raise self._unknown(wanted.model)
            readers = await self._submit(wanted)
            written = Written(wanted, self.model, self.engine.params.tokenizer)
            return Answering(readers, written, self._limits.seconds)

        return answering

    # ---- what they share

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise Wrong(401, "a bearer token is needed, and none or another one was given", code="invalid_api_key",
                        headers={"www-authenticate": "Bearer"})  # fmt: skip

    def _unknown(self, name: str) -> Wrong:
        return Wrong(
            404, f"there is no model {name[:80]!r}: this server has {self.model!r}", "model", "model_not_found"
        )

    async def _body(self, request: Request) -> bytes:
        """The body, of bounded size and within bounded time."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Wrong(415, "expected a body of content type application/json")
        most, body = self._limits.body, bytearray()
        length = request.headers.get("content-length", "0")
        large = Wrong(413, f"the body is larger than {most} bytes, which is the most that this server reads")
        if length.isdecimal() and int(length) > most:
            raise large
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise large
        except TimeoutError:
            raise Wrong(408, f"the body did not come within {self._limits.body_seconds:g} s") from None
        return bytes(body)

    async def _submit(self, wanted: Wanted) -> list[Reader]:
        """The request's answers, asked for: all of them, or none."""
        if not self._ready and self.engine.failure is None:
            raise Wrong(503, "the programs are being compiled: ask again soon", headers={"retry-after": "5"})
        engine, answers = self.engine, []

        def submit() -> None:
            settings = wanted.settings(engine, self._limits.max_tokens)
            answers.extend(engine.submit_each(wanted.prompts(), **settings))

        try:
            await anyio.to_thread.run_sync(submit)
        except BaseException as error:
            for answer in answers:
                answer.cancel()
            if isinstance(error, Busy):
                again = {"retry-after": "1"} if engine.failure is None else {}
                raise Wrong(503 if engine.closed else 429, str(error), code="busy", headers=again) from None
            if isinstance(error, JaxkvError):
                raise _refused(error, wanted) from None
            raise
        for answer in answers:
            answer.watch(self._counting(answer))
        return [Reader(answer, engine.params.tokenizer) for answer in answers]

    def _counting(self, answer: Answer) -> Callable[[], None]:
        counted = threading.Lock()

        def heard() -> None:
            if answer.ended and counted.acquire(blocking=False):
                self._metrics.ended(answer)

        return heard


class Named:
    """Answers requests to the names of `hosts` alone, whatever their port."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]):
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or answers 400."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else None
        app = self._app if host is None or _name_of(host) in self._hosts else _error(_not_here(host))
        await app(scope, receive, send)


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _not_here(host: str) -> Wrong:
    return Wrong(
        400,
        f"host {shown(host)}: this server does not answer to that name; ask it by one of its own, or start it with "
        "--host-names and this one, as behind a proxy that passes it on",
        code="unknown_host",
    )


class Answering(Response):
    """An answer, whole or as server-sent events. When the client leaves or the time is over, what runs is cancelled."""

    def __init__(self, readers: list[Reader], written: Written, seconds: float):
        self.background, self._readers, self._written, self._seconds = None, readers, written, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs beside what hears whether the client is still there."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def heard() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
                loop.call_soon_threadsafe(changed.set)

        for reader in self._readers:
            reader.answer.watch(heard)
        streams = bool(self._written.wanted.stream)
        answering = asyncio.create_task((self._stream if streams else self._whole)(changed, send, scope))
        leaving = asyncio.create_task(_left(receive))
        try:
            async with asyncio.timeout(self._seconds + 5):  # a client that does not read would hold its place for ever
                await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            for reader in self._readers:
                reader.answer.cancel()
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _whole(self, changed: asyncio.Event, send: Send, scope: Scope) -> None:
        wrong = None
        try:
            async with asyncio.timeout(self._seconds):
                while not all(reader.answer.ended for reader in self._readers):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            wrong = self._late()
        wrong = wrong or self._failed()
        response = JSONResponse(self._written.body(self._readers)) if wrong is None else _error(wrong)
        await response(scope, _nothing, send)

    async def _stream(self, changed: asyncio.Event, send: Send, scope: Scope) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout(self._seconds):
                await self._pieces(changed, send)
            wrong = self._failed()
        except TimeoutError:
            wrong = self._late()
        if wrong is not None:
            await send(_event(wrong.body()))
        else:
            options = self._written.wanted.stream_options
            if options is not None and options.include_usage:
                await send(_event(self._written.last(self._readers)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _pieces(self, changed: asyncio.Event, send: Send) -> None:
        going = dict(enumerate(self._readers))
        while True:
            for index, reader in tuple(going.items()):
                piece = reader.piece()
                if piece.finish is not None:
                    del going[index]
                if piece.finish in (CANCELLED, FAILED):  # which an error tells, and no finish_reason of the API
                    return
                if piece.text or piece.finish or piece.chances:
                    await send(_event(self._written.event(index, reader, piece)))
            if not going:
                return
            await changed.wait()
            changed.clear()

    def _late(self) -> Wrong:
        return Wrong(504, f"the answer was not there within {self._seconds:g} s: ask for fewer tokens", code="timeout")

    def _failed(self) -> Wrong | None:
        errors = [reader.answer.error for reader in self._readers if reader.answer.error is not None]
        if errors:
            error = errors[0]
            gone = f"the engine failed ({type(error.__cause__).__name__}): it has to be started again"
            return Wrong(500, str(error) if isinstance(error, BadValue) else gone)
        if any(reader.answer.finish == CANCELLED for reader in self._readers):
            return Wrong(503, "the server stops, and has ended this answer", code="stopping")
        return None


async def _left(receive: Receive) -> None:
    """Ends when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _event(data: dict[str, Any]) -> Message:
    line = f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
    return {"type": "http.response.body", "body": line.encode(), "more_body": True}


def _error(wrong: Wrong) -> JSONResponse:
    return JSONResponse(wrong.body(), wrong.status, headers=wrong.headers)


async def _wrong(_: Request, wrong: Any) -> Response:
    return _error(wrong)


async def _http_error(_: Request, error: Any) -> Response:
    return _error(Wrong(error.status_code, str(error.detail), headers=dict(error.headers or {})))


def _refused(error: JaxkvError, wanted: Wanted) -> Wrong:
    """What the engine does not take, by the API's names."""
    message = GIVEN.sub(lambda found: f"{wanted.names[found[1]]}=", str(error))
    name = re.split(r"\W", message.removeprefix("unknown "), maxsplit=1)[0]
    return Wrong(400, message, param=name if name in type(wanted).model_fields else None)
