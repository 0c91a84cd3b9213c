"""A stand-in for the Hugging Face hub: the routes of huggingface_hub's downloads and uploads, on 127.0.0.1."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    """One model: revision -> files, and how its server misbehaves."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    error: tuple[int, str] | None = None  # (status, X-Error-Code) of every answer
    breaks: list[tuple[str, str, int]] = field(
        default_factory=list
    )  # (file, close or reset, after so many bytes), once
    private: bool = False
    messages: list[str] = field(default_factory=list)  # of the commits


class Hub:
    """Holds the repositories, and every request that was made: (method, path, Range)."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.stored: dict[str, bytes] = {}  # large files by sha256
        self.writers: dict[str, str] = {}  # token -> the owner that it may write for
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, name: str, folder: Path, revision: str = "main") -> Repo:
        repo = self.repos.setdefault(name, Repo())
        repo.revisions[revision] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return repo

    def fetched(self, name: str, file: str) -> list[str | None]:
        """The Range header of every GET of this file."""
        return [span for method, path, span in self.requests if method == "GET" and _is_file(path, name, file)]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def commit_of(files: dict[str, bytes]) -> str:
    parts = (name.encode() + data for name, data in sorted(files.items()))
    return hashlib.sha1(b"".join(parts)).hexdigest()


def _is_file(path: str, name: str, file: str) -> bool:
    return path.startswith(f"/{name}/resolve/") and path.endswith(f"/{file}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request) -> None:  # a reset needs close() without the polite shutdown() before it
        if request.fileno() >= 0 and request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER):
            request.close()
        else:
            super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        """A large file, to where the batch route said."""
        self.hub.stored[self.path.rpartition("/")[2]] = self._body()
        self._send(200)

    def do_POST(self) -> None:
        """The routes of an upload; each needs a token that may write."""
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.requests.append(("POST", path, None))
        owner = self.hub.writers.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if owner is None:
            wrong = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(401, b'{"error": "Invalid credentials"}', wrong)
        if path == "/api/repos/create":
            asked = json.loads(body)
            if asked["organization"] != owner:
                return self._send(403, b'{"error": "You have no rights here"}')
            repo = Repo({"main": {}}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
            self.hub.repos[f"{owner}/{asked['name']}"] = repo
            return self._json({"url": f"{self.hub.endpoint}/{owner}/{asked['name']}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            files = json.loads(body)["objects"]
            for file in files:
                file["actions"] = {"upload": {"href": f"{self.hub.endpoint}/store/{file['oid']}"}}
            return self._json({"transfer": "basic", "objects": files})
        if parts[:2] == ["api", "models"] and parts[4] == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in files}
            answer = [{"path": name, "uploadMode": modes[name], "shouldIgnore": False} for name in files]
            return self._json({"files": answer})
        if parts[:2] == ["api", "models"] and parts[4] == "commit":
            repo = self.hub.repos["/".join(parts[2:4])]
            self._commit(repo, [json.loads(line) for line in body.splitlines()])
            sha = commit_of(repo.revisions["main"])
            return self._json(
                {"commitUrl": f"{self.hub.endpoint}/{parts[2]}/{parts[3]}/commit/{sha}", "commitOid": sha}
            )
        return self._send(404)

    def _commit(self, repo: Repo, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                repo.revisions["main"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.revisions["main"][value["path"]] = self.hub.stored[value["oid"]]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, unquote(path), self.headers.get("Range")))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if api else parts
        repo = self.hub.repos.get(f"{owner}/{name}")
        if repo is None:
            return self._send(404, headers={"X-Error-Code": "RepoNotFound"})
        if repo.error is not None:
            status, code = repo.error
            return self._send(status, b"<html>sign in to this network</html>", {"X-Error-Code": code} if code else {})
        revision = rest[1] if len(rest) > 1 else "main"
        files = repo.revisions.get(revision)
        if files is None:
            files = next((files for files in repo.revisions.values() if commit_of(files) == revision), None)
        if files is None:
            return self._send(404, headers={"X-Error-Code": "RevisionNotFound"})
        if api and rest[:1] == ["tree"]:
            return self._json([{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()])
        if api:
            siblings = [{"rfilename": name} for name in files]
            about = {"id": f"{owner}/{name}", "sha": commit_of(files), "private": repo.private}
            return self._json({**about, "siblings": siblings})
        return self._file(repo, files, "/".join(rest[2:]))

    def _file(self, repo: Repo, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._send(404, headers={"X-Error-Code": "EntryNotFound"})
        data, status = files[name], 200
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit_of(files)}
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        broken = next((b for b in repo.breaks if b[0] == name), None)
        if broken is None or self.command == "HEAD":
            return self._send(status, data, headers)
        repo.breaks.remove(broken)
        self._send(status, data, headers, stop_after=broken[2])
        self.close_connection = True
        if broken[1] == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None

    def _json(self, value) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes = b"", headers: dict | None = None, stop_after: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:stop_after])


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="module")
def hub():
    stand_in = Hub()
    yield stand_in
    if stand_in.thread.is_alive():
        stand_in.close()
