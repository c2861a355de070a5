"""The engine over HTTP: the official client of the API, and clients that mean no good."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import uvicorn
from letters import Letters
from prometheus_client import generate_latest

import jaxkv
from jaxkv import cli
from jaxkv.cli.serve import Serve
from jaxkv.errors import BadValue, JaxkvError, unknown
from jaxkv.serving import Engine
from jaxkv.serving.engine import Load
from jaxkv.serving.http import LOOPBACK, Limits, Server, _name_of, _refused
from jaxkv.serving.metrics import Metrics
from jaxkv.serving.serve import Stopped, serve
from jaxkv.serving.wire import Chat, Completion, parsed
from jaxkv.speculative.tally import Speculation

FAMILY = "llama3"
GOLDENS = Path(__file__).parents[1] / "goldens"
CHAT = [{"role": "user", "content": "Tell me"}]


def made(params, **options):
    """An engine whose few programs are soon compiled."""
    policy = jaxkv.policy("tova", budget=40, block=16)
    return Engine(params, policy, **{"rows": 2, "longest": 64, "max_new_tokens": 64, "steps": 4, "queue": 4, **options})


@contextlib.contextmanager
def served(engine, token=None, **limits):
    """A running server: its address, and what stops it."""
    limits = Limits(**{"max_tokens": 16, **limits})
    app = Server(engine, "tiny", limits=limits, token=token).app(("localhost", "127.0.0.1"), grace=30.0)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=30, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def until(true, seconds=120):
    """Waits until something is true."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.01)


def opened(address, token="none"):
    """The official client; as a context it closes its sockets."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0, timeout=60)


@pytest.fixture
def client():
    """What opens official clients: the test's end closes them, for a socket left open warns in some other test."""
    with contextlib.ExitStack() as clients:
        yield lambda *where: clients.enter_context(opened(*where))


def raw(address, data, *, parts=1, wait=20):
    """What a server answers to bytes: the status (None: it hung up), and the body."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as sock, contextlib.suppress(OSError):
        for part in np.array_split(np.frombuffer(data, np.uint8), parts):
            sock.sendall(part.tobytes())
        got = b""
        while chunk := sock.recv(65536):
            got += chunk
        head, _, body = got.partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head else None), body
    return None, b""


def post(address, path, body, headers=()):
    """The status and the answer to a body, bytes or what becomes JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **dict(headers)}.items())
    return raw(address, f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)


def got(address, path, headers=""):
    return raw(address, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}connection: close\r\n\r\n".encode())


@pytest.fixture(scope="module")
def params(tiny):
    loaded = tiny(FAMILY)
    return type(loaded)(loaded.weights, loaded.config, Letters())


@pytest.fixture(scope="module")
def running(params):
    """The address of a server, and its engine."""
    engine = made(params)
    with served(engine, body=20_000, body_seconds=1.0) as (address, _):
        assert got(address, "/health")[0] in (200, 503)
        until(lambda: got(address, "/health")[0] == 200)
        yield address, engine


@pytest.mark.long
def test_chat_whole_and_streamed(running, params, client):
    address, engine = running
    expected = jaxkv.generate(params, CHAT, policy=engine.policy, max_new_tokens=9, stop_tokens=())
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 9, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client(address).chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 9 and whole.usage.total_tokens == whole.usage.prompt_tokens + 9
    assert whole.usage.seen_tokens == whole.usage.prompt_tokens + 8 >= whole.usage.kept_tokens > 0
    chunks = list(client(address).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_several_prompts_and_samples(running, params, client):
    address, engine = running
    asked = {"temperature": 1.1, "top_p": 0.9, "seed": 7, "max_tokens": 6}
    out = client(address).completions.create(
        model="tiny", prompt=["abc", "what is"], n=2, logprobs=3, extra_body={"ignore_eos": True}, **asked
    )
    expected = [
        jaxkv.generate(
            params, text, policy=engine.policy, samples=2, temperature=1.1, top_p=0.9, seed=7, max_new_tokens=6,
            stop_tokens=(),
        )
        for text in ("abc", "what is")
    ]  # fmt: skip
    assert [choice.text for choice in out.choices] == [text for each in expected for text in each.text]
    assert [choice.index for choice in out.choices] == [0, 1, 2, 3]
    told = out.choices[0].logprobs
    assert "".join(told.tokens) == out.choices[0].text and told.text_offset == list(range(6))
    assert all(len(best) == 3 and max(best.values()) <= 0 for best in told.top_logprobs)
    assert out.usage.prompt_tokens == 3 + 7 and out.usage.completion_tokens == 24


def test_equal_prompts_draw_differently(running, params, client):
    """As those of one call of `generate`, where samples and equal prompts are told apart by the same numbers."""
    address, engine = running
    asked = {"temperature": 1.1, "seed": 3}
    out = client(address).completions.create(
        model="tiny", prompt=["abc", "what is", "abc"], n=2, max_tokens=8, extra_body={"ignore_eos": True}, **asked
    )
    expected = jaxkv.generate(
        params, ["abc", "what is", "abc"], policy=engine.policy, samples=2, max_new_tokens=8, stop_tokens=(), **asked
    )
    texts = [choice.text for choice in out.choices]
    assert texts == list(expected.text) and len({texts[at] for at in (0, 1, 4, 5)}) == 4


def test_a_completion_ends_before_its_stop_string(running, client):
    """Whole and streamed: what stands before the first place of it in the same text without."""
    address, _ = running
    asked = {"model": "tiny", "prompt": [65 - 32, 66], "max_tokens": 12, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client(address).completions.create(**asked).choices[0]
    assert whole.finish_reason == "length" and len(whole.text) == 12
    stop = whole.text[5:7]
    before = whole.text[: whole.text.index(stop)]
    cut = client(address).completions.create(**asked, stop=[stop, "unlikely"]).choices[0]
    assert cut.text == before and cut.finish_reason == "stop" and before
    pieces = list(client(address).completions.create(**asked, stop=[stop, "unlikely"], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == before
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_chat(running, client):
    address, _ = running
    out = client(address).chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    told = out.choices[0].logprobs.content
    assert len(told) == 3 and all(len(each.top_logprobs) == 2 for each in told)
    for each in told:
        assert each.logprob == each.top_logprobs[0].logprob and each.token == each.top_logprobs[0].token
        assert bytes(each.bytes).decode() == each.token


WRONG = [
    ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "a", "stop_token_ids": [10**12]}, 400, "none of the model's"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0"),
    ({"prompt": "a", "max_tokens": 10**30}, 400, "max_tokens"),
    ({"prompt": "a", "top_p": 2}, 400, "top_p"),
    ({"prompt": "a", "n": 3}, 400, "n=3"),
    ({"prompt": "a", "n": True}, 400, "n"),
    ({"prompt": "a", "budget": 41}, 400, "budget=41"),
    ({"prompt": "a", "policy": "snapkv"}, 400, "policy"),
    ({"prompt": "a", "prefix": "none"}, 400, "prefix"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a" * 9000}, 400, "context"),
    ({"prompt": [[1], [2.5]]}, 400, "prompt"),
    ({"prompt": [10**9]}, 400, "token id"),
    ({"prompt": []}, 400, "empty"),
    ({"prompt": ["a"] * 5, "n": 2}, 400, "5 prompts in one request: expected at most 4"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "model": "other"}, 404, "other"),
    ({}, 400, "prompt"),
    (b"{", 400, "body"),
    (b"", 400, "body"),
    (b"[" * 10_000, 400, "body"),
    (b'{"prompt": "a", "temperature": NaN}', 400, ""),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "\xff"}', 400, ""),
    (b'{"prompt": "\\ud800"}', 400, ""),
    (b'{"prompt": "' + b"a" * 30_000 + b'"}', 413, "larger"),
]


def test_hostile_requests_leave_a_running_stream_alone(running, params, client):
    address, engine = running
    expected = jaxkv.generate(params, "abc", policy=engine.policy, max_new_tokens=60, stop_tokens=())
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "temperature": 0, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for body, status, names in WRONG:
            stream = client(address).completions.create(**asked, extra_body={"ignore_eos": True})
            text = pool.submit(lambda stream=stream: "".join(chunk.choices[0].text for chunk in stream))
            found, answer = post(address, "/v1/completions", body)
            error = json.loads(answer)["error"]
            assert found == status and names in error["message"] and error["type"], (str(body)[:60], found, answer)
            assert text.result(60) == expected.text
    until(lambda: engine.load.taken == 0)


@pytest.mark.parametrize(
    ("error", "says", "param"),
    [
        (unknown("prefix", "nope", ["manual"]), "unknown prefix 'nope'; known: manual", "prefix"),
        (BadValue("budget=41 of a request: expected less"), "budget=41 of a request: expected less", "budget"),
        (BadValue("stop_tokens=(1, 2): expected fewer"), "stop_token_ids=(1, 2): expected fewer", "stop_token_ids"),
        (BadValue("stop strings need more: use stop_tokens="), "stop strings need more: use stop_token_ids=", "stop"),
        (BadValue("samples=3: expected 2"), "n=3: expected 2", "n"),
        (BadValue("9 tokens: or a larger max_new_tokens= here"), "9 tokens: or a larger max_new_tokens= here", None),
    ],
    ids=str,
)
def test_what_the_engine_refuses_is_said_by_the_names_of_the_api(error, says, param):
    wrong = _refused(error, parsed(Completion, b'{"prompt": "a"}'))
    assert (wrong.message, wrong.param) == (says, param)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_field_that_was_sent_is_to_blame(name):
    wanted = parsed(Chat, json.dumps({"messages": CHAT, name: 0}).encode())
    wrong = _refused(BadValue("max_new_tokens=0: expected more"), wanted)
    assert (wrong.message, wrong.param) == (f"{name}=0: expected more", name)


def test_other_errors(running, client):
    address, _ = running
    assert got(address, "/nothing")[0] == 404 and got(address, "/v1/completions")[0] == 405
    assert json.loads(got(address, "/nothing")[1])["error"]["message"]
    assert post(address, "/v1/completions", {"prompt": "a"}, {"content-type": "text/plain"})[0] == 415
    status, body = post(address, "/v1/completions", {"prompt": "a"}, {"host": "evil.example"})
    error = json.loads(body)["error"]
    assert status == 400 and "'evil.example'" in error["message"] and "--host-names" in error["message"]
    assert post(address, "/v1/completions", b"{}", {"content-length": 10**12})[0] == 413
    assert post(address, "/v1/completions", b"{", {"content-length": 500})[0] == 408  # the rest never comes
    assert raw(address, b"nonsense\r\n\r\n")[0] == 400
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunked += b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (30_000, b" " * 30_000)
    assert raw(address, chunked)[0] == 413
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client(address).completions.create(model="tiny", prompt="a", logit_bias={"5": 1})
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client(address).completions.create(model="gpt", prompt="a")


def test_a_client_that_leaves_frees_its_row(running, client):
    address, engine = running
    before = engine.load.ended.get("cancelled", 0)
    for count in range(1, 4):
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 64, "temperature": 0, "stream": True}
        stream = client(address).completions.create(**asked, extra_body={"ignore_eos": True, "seed": count})
        next(iter(stream))
        stream.close()
        until(lambda: engine.load.taken == 0 and engine.load.queued == 0)
    assert 1 <= engine.load.ended.get("cancelled", 0) - before <= 3  # unless it had ended before the client left
    assert not engine._open


def test_health_models_and_metrics(running, client):
    address, engine = running
    (model,) = client(address).models.list().data
    assert (model.id, model.policy, model.budget, model.rows) == ("tiny", "tova", 40, 2)
    assert client(address).models.retrieve("tiny").id == "tiny"
    before = engine.load.evicted
    out = client(address).completions.create(model="tiny", prompt="abc", max_tokens=50, extra_body={"ignore_eos": True})
    until(lambda: engine.load.taken == 0 and engine.load.evicted > before)
    text = got(address, "/metrics")[1].decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#") and " " in line)
    assert float(found["jaxkv_rows"]) == 2 and float(found["jaxkv_cache_bytes"]) == engine.nbytes
    assert float(found["jaxkv_requests_waiting"]) == float(found["jaxkv_rows_taken"]) == 0
    assert float(found['jaxkv_requests_total{finish="length"}']) >= 1
    until(lambda: b"jaxkv_time_to_first_token_seconds_count" in got(address, "/metrics")[1])
    assert float(found["jaxkv_generation_tokens_total"]) == engine.load.new_tokens
    gone = float(found["jaxkv_evicted_tokens_total"]) - before
    assert gone == out.usage.seen_tokens - out.usage.kept_tokens == 3 + 49 - 40
    assert not any("passes" in name or "tokens_per_pass" in name for name in found)  # it does not draft


def test_metrics_of_drafts():
    """Passes with drafts and without, and what a row got from one."""

    class Told(Engine):
        load = Load(queued=1, rows=3, taken=2, ended={"stop": 4}, prompt_tokens=50, new_tokens=60, evicted=7.5)
        nbytes = 800
        speculation = Speculation(trees=5, steps=6, acceptance_length=2.5, tokens_per_pass=1.75, departed=0, cost=1.5)

        def __init__(self):
            pass

    text = generate_latest(Metrics(Told()).registry).decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        "requests_waiting": 1, "rows": 3, "rows_taken": 2, "cache_bytes": 800, "prompt_tokens_total": 50,
        "generation_tokens_total": 60, "evicted_tokens_total": 7.5, "tokens_per_pass": 1.75,
        'passes_total{kind="drafts"}': 5, 'passes_total{kind="plain"}': 6, 'requests_total{finish="stop"}': 4,
    }  # fmt: skip
    assert {name: float(found[f"jaxkv_{name}"]) for name in expected} == expected


def test_the_page_is_one_file_of_our_own(running):
    address, _ = running
    status, page = got(address, "/")
    assert status == 200 and b"<title>jaxkv</title>" in page
    assert b"http://" not in page and b"https://" not in page and b"src=" not in page


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
def test_curl(running):
    address, _ = running
    body = json.dumps({"messages": CHAT, "max_tokens": 3, "stream": True, "temperature": 0, "ignore_eos": True})
    command = ["curl", "-sN", f"{address}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    events = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2]) and events[-2:] == ["data: [DONE]", ""]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


class Browser:
    """Chromium, driven by the WebDriver protocol."""

    ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--window-size=900,700")  # fmt: skip
    ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for one

    def __init__(self, folder):
        port = free_port()
        self._driver = subprocess.Popen(
            [shutil.which("chromedriver"), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._at = f"http://127.0.0.1:{port}/session"
        options = {"args": [*self.ARGUMENTS, f"--user-data-dir={folder}"], "binary": shutil.which("chromium")}
        asked = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        until(lambda: _listens(port))
        self._at += "/" + self("", asked)["sessionId"]

    def __call__(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def find(self, css):
        return self("/element", {"using": "css selector", "value": css})[self.ELEMENT]

    def text(self, css):
        return self(f"/element/{self.find(css)}/text")

    def click(self, css):
        self(f"/element/{self.find(css)}/click", {})

    def type(self, css, text):
        self(f"/element/{self.find(css)}/clear", {})
        self(f"/element/{self.find(css)}/value", {"text": text})

    def run(self, script):
        return self("/execute/sync", {"script": script, "args": []})

    def close(self):
        request = urllib.request.Request(self._at, method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
        self._driver.terminate()
        self._driver.wait(30)


@pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None, reason="chromium is not installed here"
)
def test_the_page_in_a_browser(running, params, tmp_path):
    address, engine = running
    expected = jaxkv.generate(params, [{"role": "user", "content": "Tell me"}], policy=engine.policy, max_new_tokens=12)
    browser = Browser(tmp_path / "profile")
    try:
        browser("/url", {"url": address})
        until(lambda: "tiny, policy tova, budget 40 tokens, 2 rows" in browser.text("#about"))
        browser.type("#text", "Tell me")
        browser.type("#most", "12")
        browser.click("#send")
        until(lambda: browser.run("return document.querySelectorAll('.kept').length") == 1)
        assert browser.run("return document.querySelector('.assistant').textContent") == expected.text
        assert browser.text(".kept").startswith("the cache holds")
        held, seen = browser.run("const m = document.querySelector('meter'); return [m.value, m.max]")
        assert held <= 40 and seen == expected.stats.seen[0]
        browser.run("document.querySelector('#budget').removeAttribute('max')")  # the server refuses it as well
        browser.type("#budget", "99")
        browser.type("#text", "And")
        browser.click("#send")
        until(lambda: browser.run("return document.querySelectorAll('.wrong').length") == 1)
        assert "budget=99" in browser.text(".wrong")
        assert browser.run("return messages.length") == 2  # what failed is no part of the conversation
        browser.type("#budget", "30")
        browser.type("#most", "64")
        browser.type("#text", "And\n")  # Enter sends
        until(lambda: not browser.run("return document.querySelector('#stop').disabled") or engine.load.taken)
        browser.run("document.querySelector('#stop').click()")
        until(lambda: browser.run("return running === null") and engine.load.taken == 0)
        browser.click("#clear")
        assert browser.run("return document.querySelectorAll('.turn').length") == 0
        script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        assert all(name.startswith(address) for name in browser.run(script))
    finally:
        browser.close()


def test_a_full_queue_a_token_and_the_time(params, client):
    engine = made(params, rows=1, queue=1)
    with served(engine, token="secret", seconds=0.2) as (address, _):
        until(lambda: got(address, "/health")[0] == 200)
        assert got(address, "/metrics")[0] == got(address, "/v1/models")[0] == 401
        assert got(address, "/v1/models", "authorization: bearer secret\r\n")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            client(address, "wrong").completions.create(model="tiny", prompt="a")
        engine.turn, turn = lambda: time.sleep(0.01) or True, engine.turn  # it does nothing for a while
        time.sleep(0.1)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            ask = lambda: client(address, "secret").completions.create(model="tiny", prompt="a")  # noqa: E731
            asked = [pool.submit(ask) for _ in range(4)]
            errors = [type(each.exception(30)).__name__ for each in asked]
        assert errors.count("RateLimitError") == 3 and errors.count("InternalServerError") == 1  # 429, and 504 for one
        engine.turn = turn
        until(lambda: not engine._open)


def test_the_stop_finishes_what_runs(params, client):
    engine = made(params)
    with served(engine) as (address, server):
        until(lambda: got(address, "/health")[0] == 200)
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 64, "temperature": 0, "stream": True}
        stream = client(address).completions.create(**asked, extra_body={"ignore_eos": True})
        pieces = [next(iter(stream))]
        server.should_exit = True
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason == "length"
        until(lambda: engine.closed)


@contextlib.contextmanager
def in_a_thread(engine, **options):
    """`serve` in a thread, which signals do not reach: its server, and the future of its end."""
    servers = []

    class Here(Stopped):
        def capture_signals(self):
            servers.append(self)
            return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patched, concurrent.futures.ThreadPoolExecutor(1) as pool:
        patched.setattr("jaxkv.serving.serve.Stopped", Here)
        ends = pool.submit(serve, engine, "tiny", **{"port": 0, "grace": 30.0, **options})
        until(lambda: ends.done() or (servers and servers[0].started))
        try:
            yield servers[0], ends
        finally:
            servers[0].should_exit = True


def port_of(server):
    return server.servers[0].sockets[0].getsockname()[1]


def test_what_the_grace_is_too_short_for_is_told_so(params):
    """Whole answers by their status, and streams by an error before their end; no client is cut off."""
    engine = made(params, max_new_tokens=1900)
    turn = engine.turn
    engine.turn = lambda: time.sleep(0.05) or turn()  # all tokens would take 24 s
    asked = {"prompt": "abc", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    with in_a_thread(engine, grace=0.3) as (server, ends), concurrent.futures.ThreadPoolExecutor(3) as pool:
        address = f"http://127.0.0.1:{port_of(server)}"
        until(lambda: got(address, "/health")[0] == 200)
        answers = [
            pool.submit(post, address, "/v1/completions", {**asked, "stream": stream})
            for stream in (True, False, False)
        ]
        until(lambda: engine.load.taken == 2 and engine.load.queued == 1)
        server.should_exit = True
        (streamed, events), *whole = [answer.result(60) for answer in answers]
        ends.result(60)
    assert [(status, json.loads(body)["error"]["code"]) for status, body in whole] == [(503, "stopping")] * 2
    *pieces, error, done = events.split(b"data: ")[1:]
    assert streamed == 200 and done.startswith(b"[DONE]") and b'"code":"stopping"' in error
    assert pieces and not any(b"cancelled" in piece for piece in pieces)


@pytest.mark.parametrize("host, shown", [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_port_that_was_free_is_said(params, host, shown):
    said = []
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with in_a_thread(made(params), host=host, listens=said.append) as (server, _):
        until(lambda: said)
        assert said == [f"http://{shown}:{port_of(server)}"]


def out_of_memory(*_):
    raise RuntimeError("out of memory\nand more of it")


@pytest.mark.parametrize(("part", "call"), [("_programs", "make"), (None, "turn")], ids=["its start", "later"])
def test_an_engine_that_fails_ends_the_server(params, monkeypatch, part, call):
    """It cannot be used again, and whoever started the server hears what was wrong."""
    engine, printed = made(params), []
    monkeypatch.setattr(threading, "excepthook", lambda said: printed.append(str(said.exc_value)))
    monkeypatch.setattr(getattr(engine, part) if part else engine, call, out_of_memory)
    with (
        in_a_thread(engine) as (_, ends),
        pytest.raises(JaxkvError, match=r"the engine failed \(RuntimeError: out of memory\), and the server has ended"),
    ):
        ends.result(60)
    assert len(printed) == 1 and "and more of it" in printed[0]


def test_who_asks_an_engine_that_could_not_start_is_not_told_to_come_again(params, monkeypatch):
    engine = made(params)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(engine._programs, "make", out_of_memory)
    with served(engine) as (address, _):
        until(lambda: b'"failed"' in got(address, "/health")[1])
        with opened(address) as client, pytest.raises(openai.InternalServerError, match="out of memory") as error:
            client.completions.create(model="tiny", prompt="a")
    assert error.value.status_code == 503 and "retry-after" not in error.value.response.headers
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.start()


@pytest.mark.parametrize(
    ("host", "name"), [("LocalHost:80", "localhost"), ("[::1]:8000", "::1"), ("[::1]", "::1"), ("a.b", "a.b"), ("", "")]
)
def test_the_name_in_a_host_header(host, name):
    assert _name_of(host) == name


@pytest.mark.parametrize(
    ("host", "more", "names"),
    [
        ("127.0.0.1", (), LOOPBACK),
        ("::1", ("proxy.example",), (*LOOPBACK, "proxy.example")),
        ("0.0.0.0", (), None),
        ("0.0.0.0", ("proxy.example",), (*LOOPBACK, "proxy.example")),
    ],
)
def test_the_names_that_a_server_answers_to(monkeypatch, host, more, names):
    found = []

    class Noted(Server):
        def app(self, hosts=None, grace=None):
            found.append(hosts)
            raise BadValue("enough")

    monkeypatch.setattr("jaxkv.serving.serve.Server", Noted)
    monkeypatch.setattr("jaxkv.serving.serve.check_free", lambda *_: None)  # not every machine has ::1
    with pytest.raises(BadValue, match="enough"):
        serve(SimpleNamespace(leads=True), "tiny", host=host, host_names=more)
    assert found == [names]


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("jaxkv.load", None)  # not even called
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadValue, match=f"port={port}: Address already in use"):
            Serve(port=port)()
    with pytest.raises(BadValue, match=r"host='nowhere\.invalid'"):
        Serve(host="nowhere.invalid")()


@pytest.mark.parametrize(
    "words, block", [([], 256), (["--block", "64"], 64), (["--policy", "epicache", "--budget", "64"], 512)], ids=str
)
def test_a_policy_keeps_its_own_block(tiny, monkeypatch, words, block):
    found, params = [], tiny("llama3")

    def engine(_, policy, **__):
        found.append(policy.block)
        raise BadValue("enough")

    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: params)
    monkeypatch.setattr("jaxkv.serving.Engine", engine)
    assert cli.main(["serve", *words]) == 2 and found == [block]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--token", ""], "token=''"),
        (["--token", " "], "token=' '"),
        (["--port", "70000"], "port=70000"),
        (["--grace", "-1"], "grace=-1"),
        (["--body", "0"], "body=0"),
        (["--seconds", "-5"], "seconds=-5"),
        (["--block", "0"], "block=0"),
        (["--num-processes", "2"], "--num-processes without --mesh"),
        (["--process-id", "0"], "--process-id without --mesh"),
    ],
    ids=str,
)
def test_the_command_refuses_before_it_loads_a_model(monkeypatch, capsys, words, says):
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: pytest.fail("it has loaded a model"))
    assert cli.main(["serve", *words]) == 2 and says in capsys.readouterr().err


def test_an_empty_token_of_the_environment_is_no_open_server(monkeypatch, capsys):
    monkeypatch.setenv("JAXKV_TOKEN", "")
    monkeypatch.setattr(jaxkv, "load", lambda *_, **__: pytest.fail("it has loaded a model"))
    assert cli.main(["serve"]) == 2 and "token='' (--token, or $JAXKV_TOKEN)" in capsys.readouterr().err


@contextlib.contextmanager
def commands(*each):
    """`jaxkv serve` in processes of their own, with these arguments."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "jaxkv.cli", "serve", *words], stderr=subprocess.PIPE, text=True)
        for words in each
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_the_command_runs_until_it_is_told_to_stop(tmp_path, client):
    """In a process of its own: it answers, finishes what runs, and ends with 0."""
    port = free_port()
    (tmp_path / "manual.txt").write_text("Press the red button.", encoding="utf-8")
    words = ["--policy", "tova", "--budget", "32", "--block", "64", "--rows", "2", "--port", str(port),
             "--prefix", f"manual={tmp_path / 'manual.txt'}", "--token", "secret", "--name", "small",
             "--max-new-tokens", "100", "--speculative", "lookup"]  # fmt: skip
    with commands(words) as (process,):
        address = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or (_listens(port) and got(address, "/health")[0] == 200), 550)
        asked = {"model": "small", "prompt": " What colour?", "max_tokens": 60, "temperature": 0, "stream": True}
        more = {"ignore_eos": True, "prefix": "manual"}
        stream = client(address, "secret").completions.create(
            **asked, stream_options={"include_usage": True}, extra_body=more
        )
        first = next(iter(stream))
        process.terminate()
        last = list(stream)[-1]
        assert first.choices[0].text and last.usage.completion_tokens == 60
        assert last.usage.prompt_tokens_details.cached_tokens > 0
        assert process.wait(60) == 0, process.communicate()


@pytest.mark.long
def test_the_command_on_two_hosts():
    """The same command on both: process 0 answers, and when all are told to stop it finishes, and both end with 0."""
    port, meeting = free_port(), free_port()
    words = ["--model", str(GOLDENS / "tiny" / FAMILY), "--policy", "tova", "--budget", "32", "--block", "16",
             "--rows", "2", "--port", str(port), "--name", "tiny", "--max-new-tokens", "64", "--longest", "64",
             "--mesh", "model=2", "--coordinator", f"127.0.0.1:{meeting}", "--num-processes", "2"]  # fmt: skip
    with commands(*([*words, "--process-id", str(number)] for number in range(2))) as both:
        address = f"http://127.0.0.1:{port}"
        until(lambda: both[0].poll() is not None or (_listens(port) and got(address, "/health")[0] == 200), 550)
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, address, "/v1/completions", asked)
            until(lambda: answer.done() or b"jaxkv_rows_taken 1.0" in got(address, "/metrics")[1])
            for process in both:
                process.terminate()
            status, body = answer.result(120)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 60
        assert [process.wait(60) for process in both] == [0, 0], [process.communicate() for process in both]


@pytest.mark.slow
def test_ten_minutes_of_clients_that_come_and_die(params):
    """No row and no request is left behind, and memory is flat: it grows no more once all has been used."""
    engine, draw, ended = made(params, rows=4, queue=8), np.random.default_rng(0), []
    policy = engine.policy
    expected = {
        n: jaxkv.generate(params, [n] * n, policy=policy, max_new_tokens=n, stop_tokens=()).tokens[0].tolist()
        for n in range(3, 40, 4)
    }
    with served(engine) as (address, _):
        until(lambda: got(address, "/health")[0] == 200)
        over, memory = threading.Event(), []

        def client_of(seed):
            mine = np.random.default_rng(seed)
            while not over.is_set():
                n = int(mine.choice(list(expected)))
                asked = {"model": "tiny", "prompt": [n] * n, "max_tokens": n, "temperature": 0, "logprobs": 0}
                try:
                    with opened(address) as one:
                        stream = one.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
                        dies = int(mine.integers(0, 8))
                        found = []
                        for number, chunk in enumerate(stream):
                            found += [ord(word) - 32 for word in chunk.choices[0].logprobs.tokens]
                            if number == dies:
                                stream.close()
                                break
                        else:
                            ended.append(found == expected[n])
                except openai.RateLimitError:
                    time.sleep(0.01)

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for seed in draw.integers(0, 2**31, 12):
                pool.submit(client_of, int(seed))
            for _ in range(SOAK_MINUTES):
                time.sleep(60)
                memory.append(resident())
            over.set()
        until(lambda: engine.load.taken == engine.load.queued == 0)
        until(lambda: not engine._open)
    assert len(ended) > 100 and all(ended)
    assert engine.load.ended["cancelled"] > 10
    print("pages of memory after each minute:", memory)
    assert memory[-1] < memory[1] * 1.02, memory  # the clients live in this process too


SOAK_MINUTES = int(os.environ.get("JAXKV_SOAK_MINUTES", "10"))


def resident():
    """This process' memory in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1])
