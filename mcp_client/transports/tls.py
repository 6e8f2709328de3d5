"""TLS as the user wants it: private CAs, a certificate of our own, rotated files, and peers known by SPIFFE id."""

from __future__ import annotations

import os
import ssl
import threading
from typing import Any

from ..config import TLS
from ..errors import ConfigurationError

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class WrongPeerError(ssl.SSLError):
    """The server's certificate is trusted, but is not that of the peer that was asked for."""


class TlsContexts:
    """The context for each new connection; made anew when one of its files has changed."""

    def __init__(self, config: TLS | None, alpn: str = "http/1.1") -> None:
        self._config = config
        self._alpn = alpn
        self._lock = threading.Lock()
        self._made: ssl.SSLContext | None = None
        self._stamp: tuple[Any, ...] = ()
        if config is not None:
            self.current()  # a wrong file is told at once, not at the first call

    def current(self) -> ssl.SSLContext:
        stamp = self.stamps()
        with self._lock:
            if self._made is None or stamp != self._stamp:
                try:
                    self._made = self._make()
                except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                    # Halfway through a rotation certificate and key may not fit: the old pair is good until they do.
                    if self._made is None:
                        raise ConfigurationError(
                            f"the TLS files of {self._config!r} can't be used: {error}"
                        ) from error
                    return self._made
                self._stamp = stamp
            return self._made

    def stamps(self) -> tuple[Any, ...]:
        """What changes when one of the files does."""
        config = self._config
        if config is None:
            return ()
        stamps = []
        for path in (config.ca, config.cert, config.key):
            if path is not None:
                try:
                    found = os.stat(path)
                    stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
                except OSError:
                    stamps.append((0, 0, 0))
        return tuple(stamps)

    def _make(self) -> ssl.SSLContext:
        config = self._config
        if config is None:
            from .._httpx import (
                httpx,
            )  # late: it costs a tenth of a second, and knows where certifi's authorities are

            context: ssl.SSLContext = httpx.create_ssl_context()
        else:
            if config.ca is None:
                context = ssl.create_default_context()
            elif os.path.isdir(config.ca):
                context = ssl.create_default_context(capath=config.ca)
            else:
                context = ssl.create_default_context(cafile=config.ca)
            context.minimum_version = _VERSIONS[config.min_version]
            if config.cert is not None:
                context.load_cert_chain(config.cert, config.key)
            if config.spiffe_id is not None:
                context.check_hostname = False  # the id takes the name's place, see check_peer
        context.set_alpn_protocols([self._alpn])
        return context

    def check_peer(self, certificate: dict[str, Any] | None) -> None:
        """Raise unless the peer's certificate (as ``getpeercert()`` gives it) names the SPIFFE id that was asked for.

        SPIFFE's X.509-SVID standard, section 2: exactly one URI in the subject's alternative names, and it is the id.
        """
        expected = self._config.spiffe_id if self._config is not None else None
        if expected is None:
            return
        named = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
        if named != [expected]:
            raise WrongPeerError(f"the peer's certificate names {named or 'no URI'}, not {expected!r}")
