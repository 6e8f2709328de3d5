"""The model file over HTTP: whole, in ranges, only if changed, and never other bytes than the digest says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_client._httpx import httpx
from stub_server import StubServer
from tests import models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.affine(tmp_path_factory.mktemp("files") / "m.onnx")


@pytest.fixture(scope="module")
def http(model: Path) -> Iterator[httpx.Client]:
    with StubServer(model) as server, httpx.Client(base_url=server.url) as client:
        yield client


FILE = "/v1/models/m/file"


def test_the_whole_file(http: httpx.Client, model: Path) -> None:
    response = http.get(FILE)
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    assert response.status_code == 200
    assert response.content == model.read_bytes()
    assert response.headers["ETag"] == f'"{digest}"'
    assert response.headers["X-Model-Digest"] == f"sha256:{digest}"
    assert response.headers["Accept-Ranges"] == "bytes"
    assert response.headers["Content-Length"] == str(model.stat().st_size)


def test_head_tells_size_and_digest_without_the_file(http: httpx.Client, model: Path) -> None:
    response = http.head(FILE)
    assert response.content == b""
    assert response.headers["Content-Length"] == str(model.stat().st_size)
    assert "ETag" in response.headers


@pytest.mark.parametrize(
    ("asked", "part"),
    [("0-9", slice(0, 10)), ("10-", slice(10, None)), ("-7", slice(-7, None)), ("5-999999", slice(5, None))],
)
def test_a_range(http: httpx.Client, model: Path, asked: str, part: slice) -> None:
    response = http.get(FILE, headers={"Range": f"bytes={asked}"})
    whole = model.read_bytes()
    assert response.status_code == 206
    assert response.content == whole[part]
    start, stop, _ = part.indices(len(whole))
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(whole)}"
    assert response.headers["ETag"]


def test_a_range_beyond_the_end(http: httpx.Client, model: Path) -> None:
    size = model.stat().st_size
    response = http.get(FILE, headers={"Range": f"bytes={size}-"})
    assert response.status_code == 416
    assert response.headers["Content-Range"] == f"bytes */{size}"


def test_a_download_is_resumed_only_if_the_file_is_the_same(http: httpx.Client) -> None:
    etag = http.head(FILE).headers["ETag"]
    assert http.get(FILE, headers={"Range": "bytes=5-", "If-Range": etag}).status_code == 206
    assert http.get(FILE, headers={"Range": "bytes=5-", "If-Range": '"other"'}).status_code == 200


@pytest.mark.parametrize("form", ["{}", "W/{}", '"a", {}', "*"])
def test_an_unchanged_file_is_not_sent_again(http: httpx.Client, form: str) -> None:
    etag = http.head(FILE).headers["ETag"]
    response = http.get(FILE, headers={"If-None-Match": form.format(etag)})
    assert (response.status_code, response.content) == (304, b"")
    assert response.headers["ETag"] == etag


def test_a_changed_file_is_sent(http: httpx.Client) -> None:
    assert http.get(FILE, headers={"If-None-Match": '"0000"'}).status_code == 200


def test_a_file_that_changed_on_disk_is_not_sent_under_the_old_digest(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "m.onnx")
    with StubServer(path) as server, httpx.Client(base_url=server.url) as http:
        before = http.head(FILE).headers["ETag"]
        models.affine(tmp_path / "m.onnx", scale=2.0)
        refused = http.get(FILE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_changed")
        assert http.post("/v2/repository/models/m/load").status_code == 200
        after = http.get(FILE)
        assert after.headers["ETag"] != before
        assert after.headers["ETag"] == f'"{hashlib.sha256(after.content).hexdigest()}"'
        path.unlink()
        assert http.get(FILE).status_code == 409


def test_external_data_comes_with_the_model_and_nothing_else_does(tmp_path: Path) -> None:
    models.external(tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "1" / "secret.txt").write_text("no part of the model")
    with StubServer(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        files = {file["name"]: file for file in http.get("/v1/models/m").json()["files"]}
        assert files.keys() == {"model.onnx", "weights.bin"}
        weights = http.get(FILE, params={"name": "weights.bin"})
        assert weights.content == (tmp_path / "m" / "1" / "weights.bin").read_bytes()
        assert files["weights.bin"]["digest"] == f"sha256:{hashlib.sha256(weights.content).hexdigest()}"
        assert files["weights.bin"]["size"] == len(weights.content)
        for name in ("secret.txt", "../1/weights.bin", "/etc/passwd"):
            assert http.get(FILE, params={"name": name}).status_code == 404
