"""A stand-in for the Hugging Face hub that takes models: repositories, branches, commits and large files."""

import base64
import hashlib
import json
import re
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.hub import Handler, Hub, serving

TOKEN = "hf_of_the_test"
USER = "me"


@dataclass
class Commit:
    """A commit with all files of its tree."""

    title: str
    message: str
    files: dict[str, bytes]
    changed: list[str]

    @property
    def id(self) -> str:
        """Its id, as git would make it: of the content."""
        return hashlib.sha1(f"{self.title}\n{self.message}\n{sorted(self.files)}".encode()).hexdigest()


@dataclass
class Repository:
    """A repository of a model."""

    visibility: str | None
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": []})


class ModelHub(Hub):
    """Server that takes models on loopback."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ModelHandler)
        self.repositories: dict[str, Repository] = {}
        self.valid = {TOKEN}
        """Tokens that may write."""
        self.large: dict[str, bytes] = {}
        """Large files by their sha256."""
        self.failures: list[int] = []
        """Status codes with which the next commits are refused."""
        self.forbidden = False
        """True: the token may only read."""
        self.refuses_cards = False
        """True: metadata of model cards is refused."""
        self.loses_answers = False
        """True: commits are taken, and never answered."""

    def variables(self, token: str = TOKEN) -> dict[str, str]:
        """Variables for huggingface_hub: this hub, a home without a login, large files over plain HTTP."""
        home = str(self.folder / "home")
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}

    def titles(self, name: str, branch: str = "main") -> list[str]:
        """Titles of the commits, oldest first."""
        return [commit.title for commit in self.commits(name, branch)]

    def commits(self, name: str, branch: str = "main") -> list[Commit]:
        """Commits, oldest first; none without the repository."""
        return list(self.repositories[name].branches[branch]) if name in self.repositories else []


@contextmanager
def model_hub(folder: Path) -> Iterator[ModelHub]:
    """Take models until the end of the block."""
    with serving(ModelHub(folder)) as server:
        try:
            yield server
        finally:
            server.loses_answers = False


class ModelHandler(Handler):
    server: ModelHub

    def do_PUT(self) -> None:
        """Take a large file, whose address is signed: without a token."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._note(urllib.parse.urlsplit(self.path).path)
        self.server.large[hashlib.sha256(data).hexdigest()] = data
        self._send(200, b"", {})

    def _route(self, path: str, body: bytes) -> None:
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.server.valid:
            self._error(401, "", "Invalid username or password.")
        elif self.server.forbidden and self.command == "POST":
            self._error(403, "", "Forbidden: you need a token with write access")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/([^/]+))?", path):
            name, what, branch = match.groups()
            repository = self.server.repositories.get(name)
            if repository is None:
                self._error(404, "RepoNotFound", f"no {name}")
            else:
                self._of_branch(name, repository, what or "", urllib.parse.unquote(branch or "main"), body)
        else:
            self._error(404, "EntryNotFound", f"no {path}")

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        is_new = name not in self.server.repositories
        if is_new:
            self.server.repositories[name] = Repository(asked.get("visibility"))
        body = {"url": f"{self.server.url}/{name}"} | ({} if is_new else {"error": "You already created this model"})
        self._send(200 if is_new else 409, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _validate(self, card: str) -> None:
        """Look at the metadata of a model card, as the hub does before a commit with README.md."""
        try:
            tree = yaml.safe_load(card.split("---\n", 2)[1])
            errors = [] if isinstance(tree, dict) and not self.server.refuses_cards else ["base_model is refused"]
        except (yaml.YAMLError, IndexError) as error:
            errors = [str(error)]
        answer = {"errors": [{"message": text} for text in errors], "warnings": []}
        self._send(400 if errors else 200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _of_branch(self, name: str, repository: Repository, what: str, branch: str, body: bytes) -> None:
        if what == "branch":
            if branch in repository.branches:
                self._error(409, "", "Reference already exists")
                return
            repository.branches[branch] = list(repository.branches["main"])
            self._json({})
            return
        if branch not in repository.branches:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            return
        commits = repository.branches[branch]
        if what == "preupload":
            self._json({"files": [self._preupload(file, commits) for file in json.loads(body)["files"]]})
        elif what == "commits":
            self._json(
                [
                    {"id": c.id, "authors": [{"user": USER}], "date": "2026-01-01T00:00:00.000Z"}
                    | {"title": c.title, "message": c.message}
                    for c in reversed(commits)
                ]
            )
        elif what == "commit":
            self._commit(name, commits, [json.loads(line) for line in body.splitlines()])
        else:
            sha = commits[-1].id if commits else "0" * 40
            self._json({"_id": "1", "id": name, "sha": sha, "private": False, "tags": [], "siblings": []})

    def _preupload(self, file: dict[str, Any], commits: list[Commit]) -> dict[str, Any]:
        path = file["path"]
        known = commits[-1].files.get(path) if commits else None
        is_large = path.endswith((".safetensors", ".bin", ".pt"))
        digest = None
        if known is not None:
            sha1 = hashlib.sha1(b"blob %d\0" % len(known) + known).hexdigest()
            digest = hashlib.sha256(known).hexdigest() if is_large else sha1
        return {
            "path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": digest
        }  # fmt: skip

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            upload = {"href": f"{self.server.url}/large/{one['oid']}?X-Amz-Signature=secret", "header": {}}
            actions = {} if one["oid"] in self.server.large else {"actions": {"upload": upload}}
            objects.append({"oid": one["oid"], "size": one["size"], "authenticated": True} | actions)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, commits: list[Commit], lines: list[dict[str, Any]]) -> None:
        if self.server.failures:
            self._error(self.server.failures.pop(0), "", "this hub is not well")
            return
        header, files, changed = {}, dict(commits[-1].files) if commits else {}, []
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                header = value
                continue
            changed.append(value["path"])
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.server.large[value["oid"]]
        commit = Commit(header["summary"], header.get("description", ""), files, changed)
        commits.append(commit)
        while self.server.loses_answers:
            time.sleep(0.05)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{commit.id}", "commitOid": commit.id})
