"""A real HTTP server on 127.0.0.1 that misbehaves as told, and keeps a log of what it got and of what it sent to the end.

with BadServer(lambda request: Reply(delay=0.2) if request.number else failed(500)) as server: ...
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    "One request as it came."

    number: int  # from 0, in the order they came
    path: str
    headers: dict  # names in lower case
    body: dict
    at: float  # monotonic seconds
    nth: int  # how often this very body had come before

    @property
    def model(self) -> str:
        return self.body["model"]

    @property
    def question(self) -> str:
        "The last message."
        return self.body["messages"][-1]["content"]


@dataclass(frozen=True)
class Reply:
    "What to answer, and how badly."

    status: int = 200
    body: bytes | dict | None = None  # None: `answer_to` the request
    headers: dict = field(default_factory=dict)
    delay: float = 0.0  # seconds before the first byte
    send: int | None = None  # bytes of the body before the connection is closed; None: all
    drip: float = 0.0  # seconds between single bytes of the body
    hang_up: bool = False  # close without a word
    endless: bool = False  # a body that goes on until the client has enough


def completion(model="m", content="", calls=(), finish="stop", usage=(11, 7), **more) -> dict:
    "A chat completion; `calls` are (name, arguments as text); `more` goes into the message."
    message = {"role": "assistant", "content": content} | more
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)
        ]
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)},
    }


def answer_to(body: dict) -> dict:
    "A call that follows from the request alone."
    digest = blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=4).hexdigest()
    calls = [("look", json.dumps({"at": digest}))]
    return completion(body["model"], calls=calls, finish="tool_calls", usage=(100 + int(digest[:2], 16), 20))


def failed(status: int, message: str = "no", **headers) -> Reply:
    "An error as providers write it."
    headers = {k.replace("_", "-"): str(v) for k, v in headers.items()}
    return Reply(status, {"error": {"message": message, "code": status}}, headers)


class BadServer:
    "Serves `behave(request)` in threads; a context manager."

    def __init__(self, behave: Callable[[Request], Reply] = lambda request: Reply()):
        self.requests: list[Request] = []
        self.finished: list[int] = []  # numbers of the requests whose answers were sent to the end
        self.open = 0  # requests under way
        self.most_open = 0
        self.sent = 0  # bytes of bodies
        self._lock, self._closing, self._seen = threading.Lock(), threading.Event(), {}
        bad = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_GET(self):
                bad._serve(self, behave)

            do_POST = do_GET

            def log_message(self, *_):
                "Say nothing."

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.request_queue_size, self._server.daemon_threads = 128, True
        self._server.server_bind()
        self._server.server_activate()
        self._server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, http, behave):
        raw = http.rfile.read(length := int(http.headers.get("content-length", 0)))
        if len(raw) < length:  # the client ended while it was sending
            return
        with self._lock:
            nth = self._seen[raw] = self._seen.get(raw, -1) + 1
            headers = {k.lower(): v for k, v in http.headers.items()}
            request = Request(len(self.requests), http.path, headers, json.loads(raw or b"{}"), time.monotonic(), nth)
            self.requests.append(request)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            with contextlib.suppress(OSError):
                self._reply(http, request, behave(request))
        finally:
            with self._lock:
                self.open -= 1

    def _reply(self, http, request, reply):
        self._closing.wait(reply.delay)
        if reply.hang_up or self._closing.is_set():
            http.close_connection = True
            return
        body = answer_to(request.body) if reply.body is None else reply.body
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        http.send_response_only(reply.status)
        usual = {
            "content-type": "application/json",
            "content-length": str(1 << 34 if reply.endless else len(raw)),
            "date": http.date_time_string(),
        }
        for name, value in (usual | reply.headers).items():
            http.send_header(name, value)
        http.end_headers()
        if reply.send is not None:
            raw, http.close_connection = raw[: reply.send], True
        pieces = [raw[i : i + 1] for i in range(len(raw))] if reply.drip else [raw]
        pieces = iter(lambda: bytes(1 << 16), None) if reply.endless else pieces
        for piece in pieces:
            http.wfile.write(piece)
            http.wfile.flush()
            self.sent += len(piece)
            if self._closing.wait(reply.drip) if reply.drip else self._closing.is_set():
                return
        with self._lock:
            self.finished.append(request.number)
