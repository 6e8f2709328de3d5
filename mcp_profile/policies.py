"""The TTL policy of an application (PROTOCOL.md section 4): one in force, its version growing by one with each change."""

from __future__ import annotations

from typing import Any

import orjson
import sqlalchemy as sa

from mcp_client.cache.ttl import TTLPolicy
from mcp_client.errors import ProtocolError

from .errors import APIError
from .schema import policies
from .store import Store

NONE: dict[str, Any] = {"version": 0, "rules": [], "default_ttl_s": None}


def current(store: Store, app: int) -> dict[str, Any]:
    """The policy in force; version 0 if there was never one."""
    with store.read() as db:
        document = db.execute(sa.select(policies.c.document).where(policies.c.app == app)).scalar()
    found: dict[str, Any] = orjson.loads(document) if document else NONE
    return found


def version(store: Store, app: int) -> int:
    with store.read() as db:
        return int(db.execute(sa.select(policies.c.version).where(policies.c.app == app)).scalar() or 0)


def put(store: Store, app: int, body: bytes) -> dict[str, Any]:
    """Put the policy that is ``body`` in force, under the next version whatever it says itself; returns it.

    400 if it is not JSON, 422 if it is no policy.
    """
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise APIError(400, "not_json", f"the body is not JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("rules", []), list):
        raise APIError(
            422, "not_a_policy", 'expected {"rules": [{"prefix", "ttl_s", "max_ttl_s"}], "default_ttl_s"}'
        )
    policy = {"version": 1, "rules": given.get("rules", []), "default_ttl_s": given.get("default_ttl_s")}
    try:
        TTLPolicy.parse(policy)
    except ProtocolError as error:
        raise APIError(422, "not_a_policy", error.message) from error
    with store.write() as db:
        # One statement decides on the version: of two that come at once each gets its own.
        row = {"app": app, "version": 1, "document": "", "changed_at": store.clock()}
        insert = store.insert(policies).values(row)
        upsert = insert.on_conflict_do_update(
            index_elements=["app"],
            set_={"version": policies.c.version + 1, "changed_at": insert.excluded.changed_at},
        )
        policy["version"] = db.execute(upsert.returning(policies.c.version)).scalar_one()
        document = orjson.dumps(policy).decode()
        db.execute(policies.update().where(policies.c.app == app).values(document=document))
    return policy
