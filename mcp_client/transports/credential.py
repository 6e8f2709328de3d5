"""A bearer token that may change: from a file, read again when it was replaced, or from a function, called again after a 401."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ..errors import ConfigurationError

Source = str | os.PathLike[str] | Callable[[], str]


class Credential:
    """The token as it is now. Never shown: not in a ``repr``, not in an error."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._token = ""
        self._stamp: tuple[int, int, int] | None = None
        if isinstance(source, str):
            self._token = _checked(source)

    def token(self) -> str:
        """The token, at hand or fetched; a file costs one ``stat``, a function is only called where there is none yet."""
        if isinstance(self._source, str):
            return self._token
        if isinstance(self._source, os.PathLike):
            return self._from_file(self._source)
        if self._token:
            return self._token
        with self._lock:
            self._token = self._token or _checked(self._source())
            return self._token

    @property
    def at_hand(self) -> bool:
        """Whether ``token()`` returns without calling the user's function."""
        return bool(self._token) or isinstance(self._source, os.PathLike)

    def renew(self, refused: str) -> bool:
        """The server refused this token: whether there is another one now."""
        if isinstance(self._source, str):
            return False
        if isinstance(self._source, os.PathLike):
            self._stamp = None
            return self._from_file(self._source) != refused
        with self._lock:
            if self._token == refused:  # else another call has renewed it already
                self._token = _checked(self._source())
            return self._token != refused

    def _from_file(self, path: os.PathLike[str]) -> str:
        try:
            found = os.stat(path)
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
            if stamp != self._stamp:
                with open(path, encoding="ascii") as file:
                    self._token = _checked(file.read())
                self._stamp = stamp
        except (OSError, UnicodeError) as error:
            if not self._token:
                raise ConfigurationError(
                    f"no API key could be read from {os.fspath(path)!r}: {type(error).__name__}"
                ) from None
        return self._token

    def __repr__(self) -> str:
        return "Credential(***)"


def _checked(token: str) -> str:
    token = token.strip() if isinstance(token, str) else ""
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigurationError("api_key must give a non-empty string of printable ASCII")
    return token
