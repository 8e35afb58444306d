"""The hub: what it answers over HTTP, and who may read what."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from huggingface_hub.errors import GatedRepoError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "someone/refused": (403, "GatedRepo"),
    "someone/absent": (404, "RepoNotFound"),
    "someone/tiny@nope": (404, "RevisionNotFound"),
}


class Handler(BaseHTTPRequestHandler):
    """Files of some repositories at one commit, and the facts of `someone/tiny`, which is gated but open to us, and of
    `someone/pickled`; everything else is refused as the hub refuses it."""

    folders: dict[str, Path]
    taken: list[str]

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.taken.append(path)
        if path.startswith("api/models/"):
            return self.tell(*path.split("/")[2:])
        parts = path.split("/")
        if len(parts) < 5 or parts[2] != "resolve":
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        for refused in (repo, f"{repo}@{revision}"):
            if refused in REFUSALS:
                status, code = REFUSALS[refused]
                return self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": "refused"})
        file = self.folders.get(repo, Path("nowhere")) / name
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = file.read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        return self.send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})

    def tell(self, owner: str, name: str, *more: str) -> None:
        repo = f"{owner}/{name}"
        if more and more[0] != "revision":  # such as the tree of its files
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if repo not in ("someone/tiny", "someone/pickled"):
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = sorted(self.folders["someone/tiny"].iterdir())
        siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in files]
        if repo == "someone/pickled":
            siblings = [{"rfilename": "pytorch_model.bin", "size": 5}]
        facts = {"id": repo, "sha": COMMIT, "gated": "manual", "siblings": siblings, "cardData": {"license": "mit"}}
        return self.send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Tests are quiet."""


SECRET = "hf_secretOfTheVisitor"


class Denied(GatedRepoError):
    def __init__(self) -> None:
        Exception.__init__(self, "gated")


class TheHub:
    """It has a model that only the owner of `SECRET` may read, and others that anybody may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []  # who may read what
        self.status = 200

    def model_info(self, repo: str, **_: Any) -> Any:
        return SimpleNamespace(gated="manual" if repo == "owner/gated" else False)

    def get(self, url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
        repo = url.partition("/api/models/")[2].removesuffix("/auth-check")
        token = headers.get("authorization", "").removeprefix("Bearer ") or None
        self.asked.append((repo, token))
        if token != SECRET:
            raise Denied
        return httpx.Response(self.status, request=httpx.Request("GET", url))
