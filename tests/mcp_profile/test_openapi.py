"""The API against its own OpenAPI document: schemathesis finds no 500, and no answer that is not as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcp_client._httpx import httpx
from mcp_client.telemetry import ProfileAPI
from mcp_profile import ProfileServer

pytest.importorskip("schemathesis", reason="schemathesis is a development tool")

_EXAMPLES = 40  # of each route: about half a minute


@pytest.mark.timeout(240)
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"seq": n, "t": 1.7e9 + n, "session": "s", "path": f"/{n % 3}", "source": "server"} for n in range(50)
    ]
    with ProfileServer(api_key="key") as server:
        ProfileAPI(server.url, "key").report({"batch_id": "b", "client_id": "c", "events": events})
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{server.url}/openapi.json",
            *("--header", "Authorization: Bearer key"),
            *("--checks", "all", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(_EXAMPLES), "--no-color"),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    routes = re.search(r"Tested: (\d+)", done.stdout)
    assert routes is not None
    assert int(routes[1]) >= 10


def test_every_error_that_a_route_gives_is_in_the_document() -> None:
    with ProfileServer(api_key="key", max_events_per_s=1) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
        for path, method in (("/v1/telemetry", "post"), ("/v1/ttl-policy", "put")):
            documented = document["paths"][path][method]["responses"]
            for headers, body, status in (
                ({}, b"{}", 401),
                ({"Authorization": "Bearer key"}, b"{}", 415),
                ({"Authorization": "Bearer key", "Content-Type": "application/json"}, b"{", 400),
                ({"Authorization": "Bearer key", "Content-Type": "application/json"}, b"[]", 422),
                (
                    {"Authorization": "Bearer key", "Content-Type": "application/json"},
                    b"0" * (8 << 20) + b"0",
                    413,
                ),
            ):
                answer = httpx.request(method.upper(), server.url + path, headers=headers, content=body)
                assert answer.status_code == status, (path, answer.text)
                assert str(status) in documented
                assert set(answer.json()["error"]) == {"code", "message", "request_id"}
    assert document["components"]["securitySchemes"]
