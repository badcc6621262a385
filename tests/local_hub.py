"""A Hub on this machine: an HTTP server that speaks as much of the Hub's API as its client uses to make a repository,
upload to it and download from it, and that fails on request.

Knows nothing of the package under test. Contents are kept in memory; git's and LFS's names of contents are computed as
the Hub does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_local_token_of_the_tests"
BREAK = -1  # instead of a status: the connection is cut after half of what was sent


@dataclass
class Fault:
    """The next ``count`` requests of this method whose path holds ``path`` are answered with ``status``."""

    method: str
    path: str
    status: int
    count: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=lambda: {"error": "told to fail"})


@dataclass
class Repo:
    private: bool
    gated: Any = False
    branches: dict[str, list[str]] = field(default_factory=dict)  # commits, the newest last
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)  # paths

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        number = sum(map(len, self.branches.values()))
        sha = hashlib.sha1(f"{number} {sorted(files)}".encode()).hexdigest()
        self.branches.setdefault(branch, []).append(sha)
        self.commits[sha] = files
        return sha

    def find(self, revision: str) -> str | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return revision if revision in self.commits else None


@dataclass
class LocalHub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS
    collections: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)  # (method, path)
    writers: set[str] = field(default_factory=lambda: {"org"})

    def add(self, repo: str, files: dict[str, bytes], private: bool = False, branch: str = "main") -> str:
        """A repository that is there; returns its commit."""
        return self.repos.setdefault(repo, Repo(private)).commit(branch, files)

    def fail(self, method: str, path: str, status: int, **how: Any) -> None:
        self.faults.append(Fault(method, path, status, **how))

    def count(self, method: str, path: str) -> int:
        return sum(known == method and path in where for known, where in self.requests)

    def newest(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        found = self.repos[repo]
        return found.commits[found.branches[branch][-1]]


def git_name(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.hub.requests.append((self.command, path))
        length = int(self.headers.get("Content-Length") or 0)
        fault = self._fault(path)
        if fault is not None and fault.status == BREAK:
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(length)
        if fault is not None:
            return self._json(fault.body, fault.status, fault.headers)
        authorised = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self._route(path, body, authorised)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _fault(self, path: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.count and fault.method == self.command and fault.path in path:
                fault.count -= 1
                return fault
        return None

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self._json({"error": code}, 404, {"X-Error-Code": code, "X-Error-Message": code})

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _route(self, path: str, body: bytes, authorised: bool) -> None:
        words = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            user = {"type": "user", "name": "tester", "orgs": []}
            return self._json(user) if authorised else self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/validate-yaml":
            return self._json({"warnings": [], "errors": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body), authorised)
        if words[:2] == ["api", "collections"]:
            if self.command == "GET":
                return self._collection("/".join(words[2:]))
            return self._collect("/".join(words[2:-1]), json.loads(body)["item"]["id"])
        if words[0] == "lfs":
            return self._lfs(words[1], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if words[:2] == ["api", "models"]:
            return self._model("/".join(words[2:4]), words[4:], body, authorised)
        if len(words) > 4 and words[2] == "resolve":
            return self._file("/".join(words[:2]), words[3:], authorised)
        return self._json({"error": f"{self.command} {path} is not spoken here"}, 501)

    def _create(self, asked: dict[str, Any], authorised: bool) -> None:
        owner = asked["organization"] or "tester"
        name = f"{owner}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if not authorised:
            return self._json({"error": "Unauthorized"}, 401)
        if owner not in self.hub.writers:
            return self._json({"error": f"You don't have the rights to create a model under {owner}"}, 403)
        if name in self.hub.repos:
            return self._json({"error": "You already created this model repo", **url}, 409)
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private" or bool(asked.get("private")))
        self.hub.repos[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._json(url)

    def _collect(self, slug: str, repo: str) -> None:
        items = self.hub.collections.setdefault(slug, [])
        if repo in items:
            return self._json({"error": "already there"}, 409)
        items.append(repo)
        return self._collection(slug)

    def _collection(self, slug: str) -> None:
        return self._json(
            {"slug": slug, "title": slug, "owner": {}, "items": [], "lastUpdated": "2026-01-01T00:00:00.000Z"}
            | {"position": 0, "private": False, "theme": "blue", "upvotes": 0}
        )

    def _lfs(self, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            if sha256(body) != oid:
                return self._json({"error": "other content"}, 400)
            self.hub.stored[oid] = body
        return self._json({}, 200 if oid in self.hub.stored else 404)

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for wanted in asked["objects"]:
            where = {"href": f"{self.hub.url}/lfs/{wanted['oid']}", "header": {}}
            actions = {"actions": {"upload": where, "verify": where}}
            objects.append({**wanted, "authenticated": True, **({} if wanted["oid"] in self.hub.stored else actions)})
        self._json({"transfer": "basic", "objects": objects})

    def _model(self, name: str, rest: list[str], body: bytes, authorised: bool) -> None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not authorised):
            return self._missing("RepoNotFound")
        what, revision = (rest[0], "/".join(rest[1:]) or "main") if rest else ("revision", "main")
        if what == "settings":
            repo.gated = json.loads(body).get("gated", repo.gated)
            return self._json({})
        if what == "branch":
            if revision in repo.branches:
                return self._json({"error": "Reference already exists"}, 409)
            repo.branches[revision] = [repo.branches["main"][-1]]
            return self._json({})
        sha = repo.find("main" if what == "tree" and not revision else revision.split("/")[0])
        if sha is None:
            return self._missing("RevisionNotFound")
        files = repo.commits[sha]
        answers: dict[str, Callable[[], Any]] = {
            "revision": lambda: self._info(name, repo, sha),
            "tree": lambda: [_entry(repo, path, content) for path, content in files.items()],
            "paths-info": lambda: [
                _entry(repo, path, files[path]) for path in parse_qs(body.decode())["paths"] if path in files
            ],
            "preupload": lambda: self._preupload(repo, files, json.loads(body)["files"]),
            "commit": lambda: self._commit(name, repo, revision, files, body),
        }
        return self._json(answers[what]())

    def _info(self, name: str, repo: Repo, sha: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return {"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}

    def _preupload(self, repo: Repo, files: dict[str, bytes], asked: list[dict[str, Any]]) -> dict[str, Any]:
        answers = []
        for wanted in asked:
            path, is_lfs = wanted["path"], wanted["path"].endswith(".safetensors")
            there = files.get(path)
            oid = None if there is None else sha256(there) if is_lfs else git_name(there)
            answers.append(
                {"path": path, "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False, "oid": oid}
            )
        return {"files": answers}

    def _commit(self, name: str, repo: Repo, branch: str, files: dict[str, bytes], body: bytes) -> dict[str, Any]:
        files = dict(files)
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
                repo.lfs.add(value["path"])
        sha = repo.commit(branch, files)
        return {"success": True, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha}

    def _file(self, name: str, rest: list[str], authorised: bool) -> None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not authorised):
            return self._missing("RepoNotFound")
        sha, path = repo.find(rest[0]), "/".join(rest[1:])
        if sha is None:
            return self._missing("RevisionNotFound")
        content = repo.commits[sha].get(path)
        if content is None:
            return self._missing("EntryNotFound")
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{sha256(content) if path in repo.lfs else git_name(content)}"')
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start:])


def _entry(repo: Repo, path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_name(content)}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
    return entry
