"""A small Hugging Face hub on this machine: as much of its API as huggingface_hub, transformers and datasets ask for.

Files are served as the hub serves them: small ones at once, those in LFS (weights, Parquet) by a redirect to another
address, which knows ranges. Every request is logged, and the connection can be broken in the middle of a file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

MODEL, DATASET = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
IN_LFS = ("*.safetensors", "*.parquet")
API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)(/(?P<what>revision|tree|paths-info)/(?P<rest>.+))?"
)
RESOLVE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True)
class Request:
    """One request as it came: `status` is that of the answer, `range` the header."""

    method: str
    path: str
    status: int
    range: str = ""
    agent: str = ""

    @property
    def is_download(self) -> bool:
        """Whether it fetched the content of a file."""
        return (
            self.method == "GET" and (self.path.startswith("/cdn/") or "/resolve/" in self.path) and self.status < 300
        )


class Repository:
    """The files of a folder, in one commit."""

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        self.kind, self.name = kind, name
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        whole = b"".join(path.encode() + content for path, content in self.files.items())
        self.commit = hashlib.sha1(whole).hexdigest()

    def info(self) -> dict[str, Any]:
        """As `/api/models/NAME` answers."""
        siblings = [{"rfilename": path} for path in self.files]
        return {"_id": "0", "id": self.name, "sha": self.commit, "private": False, "gated": False, "tags": [],
                "lastModified": "2026-01-01T00:00:00.000Z", "siblings": siblings}  # fmt: skip

    def entries(self, below: str = "", *, recursive: bool = True) -> list[dict[str, Any]]:
        """As `/api/models/NAME/tree/REVISION` answers, folders included."""
        found: dict[str, dict[str, Any]] = {}
        prefix = f"{below}/" if below else ""
        for path, content in self.files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for end in range(1, len(parts)):
                folder = prefix + "/".join(parts[:end])
                if recursive or end == 1:
                    found[folder] = {"type": "directory", "path": folder, "oid": git_id(folder.encode()), "size": 0}
            if recursive or len(parts) == 1:
                found[path] = entry(path, content)
        return list(found.values())


def entry(path: str, content: bytes) -> dict[str, Any]:
    """One file of a tree."""
    told = {"type": "file", "path": path, "oid": git_id(content), "size": len(content)}
    if in_lfs(path):
        told["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return told


def in_lfs(path: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in IN_LFS)


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class LocalHub:
    """The server: `with LocalHub() as hub`, and `HF_ENDPOINT` is `hub.address`."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.breaks: list[int] = []
        """Of the next downloads of weights, each: after how many bytes the connection is broken."""
        self.goes_on = threading.Event()
        """Until it is set, downloads of weights stop after `stalls_after` bytes."""
        self.stalls_after: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.elsewhere = f"http://localhost:{self._server.server_port}"
        """The same under another name: a redirect to it leaves the hub, as one to a CDN does."""

    def add(self, kind: str, name: str, folder: Path) -> Repository:
        """Put a folder on the hub; `kind` is models or datasets."""
        made = self.repositories[kind, name] = Repository(kind, name, folder)
        return made

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Be gone: who asks is refused."""
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> list[str]:
        """The paths whose content was fetched."""
        return [request.path for request in self.requests if request.is_download]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            """Of this hub."""

        Handler.hub = hub
        return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *words: Any) -> None:
        """Requests are logged as `Request`."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        if path.startswith("/cdn/"):
            return self._send_content(path)
        if path == "/api/agent-harnesses":  # asked once a day, of the programs that an agent may run in
            return self._json({})
        if match := RESOLVE.fullmatch(path):
            return self._resolve(match)
        match = API.fullmatch(path)
        repository = self._find(match and match["kind"], match and match["name"])
        if match is None or repository is None:
            return self._missing("RepoNotFound", "Repository not found")
        revision, _, below = (match["rest"] or "main").partition("/")
        if revision not in ("main", repository.commit):
            return self._missing("RevisionNotFound", f"Invalid rev id: {revision}")
        if match["what"] == "tree":
            is_recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            found = repository.entries(below, recursive=is_recursive)
            return self._json(found) if found else self._missing("EntryNotFound", f"{below} does not exist")
        if match["what"] == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return self._json([each for each in repository.entries() if each["path"] in wanted])
        return self._json(repository.info())

    def _find(self, kind: str | None, name: str | None) -> Repository | None:
        return self.hub.repositories.get((kind or "", name or ""))

    def _resolve(self, match: re.Match[str]) -> None:
        repository = self._find("datasets" if match["kind"] else "models", match["name"])
        if repository is None:
            return self._missing("RepoNotFound", "Repository not found")
        if match["revision"] not in ("main", repository.commit):
            return self._missing("RevisionNotFound", f"Invalid rev id: {match['revision']}")
        content = repository.files.get(match["path"])
        about = {"X-Repo-Commit": repository.commit}
        if content is None:
            return self._missing("EntryNotFound", "Entry not found", about)
        if not in_lfs(match["path"]):
            return self._send(HTTPStatus.OK, content, {**about, "ETag": f'"{git_id(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        about |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        about |= {"Location": f"{self.hub.elsewhere}/cdn/{match['kind'] or 'models/'}{match['name']}/{match['path']}"}
        return self._send(HTTPStatus.FOUND, b"", about)

    def _send_content(self, path: str) -> None:
        _, _, kind, owner, name, rest = path.split("/", 5)
        content = self.hub.repositories[kind, f"{owner}/{name}"].files[rest]
        about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self._send(HTTPStatus.OK, content, about)
        first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._send(HTTPStatus.PARTIAL_CONTENT, content[first : last + 1], about)

    def _json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, words: str, about: dict[str, str] | None = None) -> None:
        headers = {**(about or {}), "X-Error-Code": code, "X-Error-Message": words}
        self._send(HTTPStatus.NOT_FOUND, json.dumps({"error": words}).encode(), headers)

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        said = self.headers
        logged = Request(self.command, self.path, int(status), said.get("Range", ""), said.get("User-Agent", ""))
        self.hub.requests.append(logged)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        is_weights = self.path.endswith(".safetensors")
        end = self.hub.breaks.pop(0) if is_weights and self.hub.breaks else len(body)
        first = self.hub.stalls_after if is_weights and self.hub.stalls_after is not None else end
        with suppress(ConnectionError):  # who asked is gone
            self.wfile.write(body[:first])
            if first < end:
                self.hub.goes_on.wait()
                self.wfile.write(body[first:end])
        if end < len(body):
            self.close_connection = True
