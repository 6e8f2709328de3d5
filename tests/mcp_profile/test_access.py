"""API keys: hashed, scoped, revocable, each for one application; and the commands that keep them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mcp_client._httpx import httpx
from mcp_client.errors import AuthenticationError
from mcp_client.telemetry import ProfileAPI
from mcp_profile import ProfileServer
from mcp_profile.access import Access
from mcp_profile.cli import app
from mcp_profile.errors import APIError
from mcp_profile.store import Store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "db.sqlite"


@pytest.fixture
def access(file: Path) -> Iterator[Access]:
    store = Store(f"sqlite:///{file}")
    yield Access(store)
    store.close()


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_without_any_key_a_server_is_open_and_with_one_it_is_not(access: Access) -> None:
    assert access.application(None, "read") == 1
    secret = access.create()
    assert not access.is_open()
    with pytest.raises(APIError, match="Bearer"):
        access.application(None, "read")
    assert access.application(f"Bearer {secret}", "read") == 1
    assert access.revoke(1)
    with pytest.raises(APIError, match="revoked"):
        access.application(f"bearer {secret}", "read")
    assert not access.is_open()  # the last key gone does not open the door


def test_a_key_does_what_its_scopes_say(access: Access) -> None:
    writer = access.create(scopes=["ingest"])
    admin = access.create(scopes=["admin"])
    assert access.application(f"Bearer {writer}", "ingest") == 1
    with pytest.raises(APIError) as caught:
        access.application(f"Bearer {writer}", "read")
    assert caught.value.status == 403
    assert access.application(f"Bearer {admin}", "read") == 1
    with pytest.raises(ValueError, match="scopes are"):
        access.create(scopes=["root"])


def test_the_secret_is_not_in_the_database(access: Access, file: Path) -> None:
    secret = access.create(name="laptop")
    assert len(secret) > 40
    for part in file.parent.iterdir():
        assert secret.encode() not in part.read_bytes()
    assert [(key.name, key.scopes, key.revoked_at) for key in access.ls()] == [
        ("laptop", ("ingest", "read"), None)
    ]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic abc", "Bearer \ud800", "Bearer wrong", "wrong"]
)
def test_what_is_no_key_is_refused(header: str, access: Access) -> None:
    access.create()
    with pytest.raises(APIError) as caught:
        access.application(header, "read")
    assert caught.value.status == 401


def test_applications_see_their_own_and_nothing_else(file: Path) -> None:
    with ProfileServer(file) as server:
        keys = Access(server.store)
        shop, blog = (keys.create(application=name) for name in ("shop", "blog"))
        for key, path in ((shop, "/cart"), (blog, "/post")):
            event = {"seq": 1, "t": 1.7e9, "session": "s", "path": path, "source": "server"}
            batch = {"batch_id": "the same id", "client_id": "the same client", "events": [event]}
            assert ProfileAPI(server.url, key).report(batch).accepted == 1
        profile, _ = ProfileAPI(server.url, shop).profile()
        assert profile is not None
        assert list(profile.keys) == ["/cart"]
        headers = {"Authorization": f"Bearer {blog}"}
        assert httpx.get(server.url + "/v1/graph?session=s", headers=headers).json()["nodes"] == [
            {"path": "/post", "count": 1}
        ]
        assert httpx.get(server.url + "/v1/stats", headers=headers).json()["events"] == 1
        assert [
            path["steps"]
            for path in httpx.get(server.url + "/v1/paths?min_support=1", headers=headers).json()["paths"]
        ] == [["/post"]]


def test_the_commands_make_list_and_revoke_keys(file: Path) -> None:
    secret = _run("keys", "create", "--db", str(file), "--name", "ci", "--scope", "ingest").split()[0]
    assert re.fullmatch(r"mcp_[\w-]{43}", secret)
    listing = _run("keys", "ls", "--db", str(file))
    assert "ci" in listing
    assert "ingest" in listing
    assert secret not in listing
    with ProfileServer(file) as server:
        assert (
            ProfileAPI(server.url, secret).report({"batch_id": "b", "client_id": "c", "events": []}).accepted
            == 0
        )
        with pytest.raises(AuthenticationError):
            ProfileAPI(server.url, secret).profile()
        _run("keys", "revoke", "1", "--db", str(file))
        with pytest.raises(AuthenticationError):
            ProfileAPI(server.url, secret).report({"batch_id": "b2", "client_id": "c", "events": []})
    assert CliRunner().invoke(app, ["keys", "revoke", "7", "--db", str(file)]).exit_code == 1


def test_serve_refuses_to_be_open_to_the_network(file: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0", "--port", "0", "--db", str(file)])
    assert result.exit_code == 2
    assert "refusing" in result.output


def test_mine_counts_what_is_new(file: Path) -> None:
    with ProfileServer(file) as server:
        event = {"seq": 1, "t": 1.7e9, "session": "s", "path": "/a", "source": "server"}
        ProfileAPI(server.url).report({"batch_id": "b", "client_id": "c", "events": [event]})
    assert "1 events mined" in _run("mine", "--db", str(file))
    assert "0 events mined" in _run("mine", "--db", str(file))
    assert "1 events mined" in _run("mine", "--db", str(file), "--anew")
    assert CliRunner().invoke(app, ["mine", "--db", str(file), "--application", "none"]).exit_code == 2
