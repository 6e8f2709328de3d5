"""Who may do what: API keys, hashed and scoped, each belonging to one application."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from .errors import APIError
from .schema import applications, keys
from .store import DEFAULT_APP, Store

SCOPES = ("ingest", "read", "admin")
_PREFIX = "mcp_"


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it may be shown: never the secret."""

    id: int
    application: str
    name: str
    scopes: tuple[str, ...]
    created_at: float
    revoked_at: float | None


class Access:
    """Decides on a request's ``Authorization`` header.

    ``master`` is a key given at start; it may do everything for the default application. Without it and
    without any key in the database the server is open, which only a loopback address may be. ``admin``
    includes the other scopes.
    """

    def __init__(self, store: Store, *, master: str | None = None) -> None:
        self._store = store
        self._master = master

    def is_open(self) -> bool:
        if self._master:
            return False
        with self._store.read() as db:
            return db.execute(sa.select(keys.c.id).limit(1)).first() is None

    def application(self, authorization: str | None, scope: str) -> int:
        """The application that the caller speaks for.

        401 without a valid key, 403 if the key lacks ``scope``.
        """
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            if self.is_open():
                return DEFAULT_APP
            raise _unauthorised(
                "send 'Authorization: Bearer <key>'; a key comes from `mcp-profile keys create`"
            )
        secret = secret.strip()
        if self._master and hmac.compare_digest(secret.encode(), self._master.encode()):
            return DEFAULT_APP
        with self._store.read() as db:
            found = db.execute(
                sa.select(keys.c.app, keys.c.scopes).where(
                    keys.c.digest == _digest(secret), keys.c.revoked_at.is_(None)
                )
            ).first()
        if found is None:
            if self.is_open():
                return DEFAULT_APP  # a client that is set up with a key may talk to a server that wants none
            raise _unauthorised("the API key is unknown or revoked")
        scopes = found.scopes.split()
        if scope not in scopes and "admin" not in scopes:
            raise APIError(403, "forbidden", f"the API key has {', '.join(scopes)}; this needs {scope}")
        return int(found.app)

    def create(
        self, *, application: str = "default", name: str = "", scopes: Sequence[str] = ("ingest", "read")
    ) -> str:
        """Make a key, and its application if that is new; the secret, which is not kept."""
        unknown = [scope for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            raise ValueError(f"scopes are {', '.join(SCOPES)}; got {', '.join(unknown) or 'none'}")
        secret = _PREFIX + secrets.token_urlsafe(32)
        with self._store.write() as db:
            db.execute(self._store.insert(applications).values(name=application).on_conflict_do_nothing())
            app = db.execute(
                sa.select(applications.c.id).where(applications.c.name == application)
            ).scalar_one()
            values: dict[str, Any] = {
                "app": app,
                "name": name,
                "digest": _digest(secret),
                "scopes": " ".join(dict.fromkeys(scopes)),
                "created_at": self._store.clock(),
            }
            db.execute(keys.insert().values(values))
        return secret

    def ls(self) -> list[Key]:
        columns = (
            keys.c.id,
            applications.c.name,
            keys.c.name,
            keys.c.scopes,
            keys.c.created_at,
            keys.c.revoked_at,
        )
        with self._store.read() as db:
            rows = db.execute(
                sa.select(*columns).join(applications, applications.c.id == keys.c.app).order_by(keys.c.id)
            ).all()
        return [Key(row[0], row[1], row[2], tuple(row[3].split()), row[4], row[5]) for row in rows]

    def revoke(self, key_id: int) -> bool:
        """Whether there was such a key in force."""
        with self._store.write() as db:
            statement = keys.update().where(keys.c.id == key_id, keys.c.revoked_at.is_(None))
            return db.execute(statement.values(revoked_at=self._store.clock())).rowcount > 0


def _digest(secret: str) -> str:
    # A plain hash is enough for 256 random bits: there is nothing to guess.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _unauthorised(message: str) -> APIError:
    return APIError(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})
