"""A stand-in for the Hugging Face hub to which clients upload: models in memory, and the API that clients call.

All files are uploaded as parts of the commit, as the hub has small ones.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Model:
    """A repository of a model."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Message of each commit."""


class ModelHub(http.server.ThreadingHTTPServer):
    """Server of models on loopback. Names without an owner become those of `somebody`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Model] = {}
        self.tokens: set[str] = set()
        """Authorization headers of all requests."""

    @property
    def url(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Serve until the end of the block."""
    server = ModelHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""

    def do_POST(self) -> None:
        """Create a model, say how files are uploaded, or commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urllib.parse.urlsplit(self.path).path
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path):
            name, what = match.groups()
            if name not in self.server.models:
                self._answer(404, {"error": "Repository not found"})
            elif what == "preupload":
                files = [one["path"] for one in json.loads(body)["files"]]
                shown = [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files]
                self._answer(200, {"files": shown})
            else:
                self._commit(name, [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"no {path}"})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
        if name in self.server.models:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
            return
        self.server.models[name] = Model(wanted.get("private") is True or wanted.get("visibility") == "private")
        self._answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        model = self.server.models[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                model.messages.append(value["summary"])
            else:
                assert (line["key"], value["encoding"]) == ("file", "base64")
                model.files[value["path"]] = base64.b64decode(value["content"])
        oid = hashlib.sha1(repr(lines).encode()).hexdigest()
        self._answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
