"""A stand-in for the Hugging Face hub: data sets in folders, served by the parts of its HTTP API that clients call."""

import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

HubT = TypeVar("HubT", bound="Hub")


class Hub(http.server.ThreadingHTTPServer):
    """Server of data sets on loopback.

    Args:
        folder: folder with `OWNER/NAME/COMMIT/` for each commit of each data set.
    """

    daemon_threads = True

    def __init__(self, folder: Path, handler: "type[Handler] | None" = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.folder = folder
        self.branches: dict[tuple[str, str], str] = {}
        """Commit of each branch, by data set and branch."""
        self.gated: set[str] = set()
        self.silent = False
        """True to accept requests and never answer."""
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        """Authorization headers of all requests."""

    @property
    def url(self) -> str:
        """Address for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def publish(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Commit the files of a data set to a branch. Return the commit."""
        content = b"".join(path.encode() + data for path, data in sorted(files.items()))
        commit = hashlib.sha1(content).hexdigest()
        for path, data in files.items():
            file = self.folder / name / commit / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        self.branches[name, branch] = commit
        return commit

    def commit_of(self, name: str, revision: str) -> str | None:
        """Return the commit of a branch, or the commit itself; None if there is none."""
        if (self.folder / name / revision).is_dir():
            return revision
        return self.branches.get((name, urllib.parse.unquote(revision)))


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    """Serve data sets until the end of the block."""
    with serving(Hub(folder)) as server:
        yield server


@contextmanager
def serving(server: HubT) -> Iterator[HubT]:
    """Run a server until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.silent = False
        server.shutdown()
        server.server_close()
        thread.join(10)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        """Answer with headers alone."""
        self._answer()

    def do_GET(self) -> None:
        """Answer."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a question with a body."""
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes = b"") -> None:
        path = urllib.parse.urlsplit(self.path).path
        self._note(path)
        self._route(path, body)

    def _note(self, path: str) -> None:
        self.server.requests.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("Authorization", ""))
        while self.server.silent:
            time.sleep(0.05)

    def _route(self, path: str, body: bytes) -> None:
        if match := re.fullmatch(
            r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path
        ):
            name, what, revision, below = match.groups()
            self._api(name, what or "revision", revision or "main", urllib.parse.unquote(below or ""), body)
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
            self._file(*match.groups())
        else:
            self._error(404, "EntryNotFound", f"no {path}")

    def _known(self, name: str, revision: str) -> str | None:
        """Return the commit, or answer that there is none."""
        if not (self.server.folder / name).is_dir():
            self._error(401, "RepoNotFound", "Invalid username or password.")
        elif name in self.server.gated and "secret" not in self.headers.get("Authorization", ""):
            self._error(403, "GatedRepo", f"Access to dataset {name} is restricted")
        elif (commit := self.server.commit_of(name, revision)) is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return commit
        return None

    def _api(self, name: str, what: str, revision: str, below: str, body: bytes) -> None:
        commit = self._known(name, revision)
        if commit is None:
            return
        root = self.server.folder / name / commit
        files = [file for file in sorted(root.rglob("*")) if file.is_file()]
        if what == "revision":
            siblings = [{"rfilename": str(file.relative_to(root))} for file in files]
            info = {"_id": "1", "id": name, "sha": commit, "private": False, "gated": False, "siblings": siblings}
            self._json({**info, "tags": [], "downloads": 0, "likes": 0, "disabled": False, "author": "org"})
            return
        if what == "paths-info":
            asked = urllib.parse.parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            asked = [asked] if isinstance(asked, str) else asked
            files = [root / path for path in asked if (root / path).exists()]
        else:
            found = (root / below).glob("**/*" if "recursive=true" in self.path.lower() else "*")
            files = sorted(found)
            if not files:
                self._error(404, "EntryNotFound", f"no {below}")
                return
        self._json([_entry(file, root) for file in files])

    def _file(self, name: str, revision: str, path: str) -> None:
        commit = self._known(name, revision)
        if commit is None:
            return
        file = self.server.folder / name / commit / urllib.parse.unquote(path)
        if not file.is_file():
            self._error(404, "EntryNotFound", f"no {path}", commit)
            return
        data, status = file.read_bytes(), 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self._send(status, data, headers | {"Content-Type": "application/octet-stream"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, words: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": words} | ({"X-Repo-Commit": commit} if commit else {})
        self._send(status, json.dumps({"error": words}).encode(), headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(file: Path, root: Path) -> dict[str, Any]:
    path = str(file.relative_to(root))
    if file.is_dir():
        return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    data = file.read_bytes()
    return {"type": "file", "path": path, "oid": _oid(data), "size": len(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
