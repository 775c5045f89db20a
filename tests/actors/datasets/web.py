"""A server of images on this machine, whose answers a test decides."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """Pages by path, and what was asked for.

    A page is the bytes of an answer 200, the number of another status, a text to be redirected to, or a function that
    answers. Of a list each request takes the first answer left, and the last one stays.
    """

    def __init__(self, port: int) -> None:
        self.origin = f"http://127.0.0.1:{port}"
        self.pages: dict[str, bytes | int | str | Answer | list[bytes | int]] = {}
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.closing = Event()
        self._lock = Lock()

    def url(self, path: str) -> str:
        """The URL of a page."""
        return f"{self.origin}{path}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request by its page."""
        with self._lock:
            self.asked.append(request.path)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            page = self.pages.get(request.path, 404)
            if isinstance(page, list):
                page = page.pop(0) if len(page) > 1 else page[0]
        if callable(page):
            page(request)
            return
        body = page if isinstance(page, bytes) else b"no image"
        request.send_response(200 if isinstance(page, bytes) else 302 if isinstance(page, str) else page)
        if isinstance(page, str):
            request.send_header("Location", page)
        request.send_header("Set-Cookie", "known=yes; Path=/")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def endless(self, pause: float) -> Answer:
        """Make an answer without end, in parts of 1000 bytes with a pause after each."""

        def write(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            while not self.closing.is_set():
                request.wfile.write(bytes(1000))
                time.sleep(pause)

        return write


@contextmanager
def serving() -> Iterator[Web]:
    """Provide a server on a free port, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.answer(self)

        def do_CONNECT(self) -> None:
            web.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that has seen enough leaves

    server = Server(("127.0.0.1", 0), Handler)
    web = Web(server.server_address[1])
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        web.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
