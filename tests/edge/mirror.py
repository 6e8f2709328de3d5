"""A server of one model over bare sockets, which can be told to lie, to break off after any number of
bytes, and to forget ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.conftest import read_request


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@dataclass
class Mirror:
    """What is served: ``content`` under ``model`` and ``version``. ``budget``: bytes until every
    connection breaks off.
    """

    content: bytes
    model: str = "m"
    version: str = "1"
    digest: str = ""  # announced; "" for the true one
    size: int | None = None  # announced; None for the true one
    parts: Mapping[str, bytes] = field(default_factory=dict)
    budget: int | None = None
    ranges: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and Range header of each request
    sent: int = 0

    def __call__(self, connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            line, headers, _ = request
            target = urlsplit(line.split(" ")[1])
            path = unquote(target.path)
            self.asked.append((path, headers.get("range", "")))
            if path == "/v1/models":
                self._json(connection, {"models": [self._about()]})
            elif path == f"/v1/models/{self.model}":
                self._json(connection, self._about())
            elif path == f"/v1/models/{self.model}/file":
                name = parse_qs(target.query).get("name", [""])[0]
                self._file(connection, self.parts[name] if name else self.content, headers)
            else:
                self._send(connection, b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n")

    def _about(self) -> dict[str, object]:
        files = [
            {
                "name": "model.onnx",
                "digest": self.digest or digest_of(self.content),
                "size": len(self.content),
            }
        ]
        if self.size is not None:
            files[0]["size"] = self.size
        files += [
            {"name": name, "digest": digest_of(part), "size": len(part)} for name, part in self.parts.items()
        ]
        return {
            "id": self.model,
            "version": self.version,
            "digest": self.digest or digest_of(self.content),
            "files": files,
        }

    def _json(self, connection: socket.socket, document: object) -> None:
        body = json.dumps(document).encode()
        self._send(connection, f"HTTP/1.1 200 x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _file(self, connection: socket.socket, content: bytes, headers: Mapping[str, str]) -> None:
        etag = f'"{digest_of(content)[7:]}"'
        start, status = 0, 200
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if self.ranges and asked and headers.get("if-range") == etag:
            start, status = int(asked[1]), 206
            if start >= len(content):
                self._send(connection, b"HTTP/1.1 416 x\r\nContent-Length: 0\r\n\r\n")
                return
            extra += f"Content-Range: bytes {start}-{len(content) - 1}/{len(content)}\r\n"
        body = content[start:]
        head = f"HTTP/1.1 {status} x\r\nETag: {etag}\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
        self._send(connection, head.encode() + body)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        whole = self.budget is None or self.sent + len(data) <= self.budget
        if not whole:
            data = data[: max(0, (self.budget or 0) - self.sent)]
        self.sent += len(data)
        connection.sendall(data)
        if not whole:
            raise OSError("cut")  # the connection is closed


@dataclass
class Static(Mirror):
    """Any web server over a folder: an ETag of its own, ranges if ``ranges``, redirects of ``moved`` (path → URL)."""

    content: bytes = b""
    root: Path = Path()
    moved: Mapping[str, str] = field(default_factory=dict)
    authorization: list[str] = field(default_factory=list)  # what each request brought

    def __call__(self, connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            line, headers, _ = request
            path = unquote(urlsplit(line.split(" ")[1]).path)
            self.asked.append((path, headers.get("range", "")))
            self.authorization.append(headers.get("authorization", ""))
            file = self.root / path.lstrip("/")
            if path in self.moved:
                head = f"HTTP/1.1 302 x\r\nLocation: {self.moved[path]}\r\nContent-Length: 0\r\n\r\n"
                self._send(connection, head.encode())
            elif file.is_file():
                self._serve(connection, file.read_bytes(), headers.get("range", ""))
            else:
                self._send(connection, b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n")

    def _serve(self, connection: socket.socket, content: bytes, asked: str) -> None:
        found = re.fullmatch(r"bytes=(\d+)-", asked)
        if self.ranges and found:
            start = int(found[1])
            status = f"206 x\r\nContent-Range: bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        else:
            status = "200 x"
        head = f'HTTP/1.1 {status}\r\nETag: "its-own"\r\nContent-Length: {len(content)}\r\n\r\n'
        self._send(connection, head.encode() + content)
