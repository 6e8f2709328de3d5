"""The request book: the inputs of requests seen before, by path, so that they can be asked for again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from ..request import Request
from ..tensors import nbytes_of, read_only


class RequestBook:
    """The last request of each path, within ``max_bytes`` of inputs; the path longest unused goes first."""

    def __init__(self, max_bytes: int, fingerprint: Callable[[Request], bytes]) -> None:
        self._max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._pages: OrderedDict[str, tuple[bytes, Request, int]] = OrderedDict()
        self._bytes = 0
        self.lock = threading.Lock()

    def remember(self, path: str, request: Request, key: bytes) -> None:
        """Keep a copy of the inputs, unless they are kept already.

        This runs after the call, and the application may have reused its buffers by then: a copy whose fingerprint is
        not the call's own is thrown away.
        """
        with self.lock:
            known = self._pages.get(path)
            if known is not None and known[0] == key:
                self._pages.move_to_end(path)
                return
        if nbytes_of(request.inputs) > self._max_bytes:
            return
        copy = replace(request, inputs={name: read_only(array) for name, array in request.inputs.items()})
        if self._fingerprint(copy) != key:
            return
        size = nbytes_of(copy.inputs) + len(path)
        with self.lock:
            self._forget(path)
            self._pages[path] = key, copy, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._pages)))

    def get(self, path: str) -> Request | None:
        """The request that a path had last."""
        with self.lock:
            page = self._pages.get(path)
            return page[1] if page is not None else None

    def _forget(self, path: str) -> None:
        page = self._pages.pop(path, None)
        if page is not None:
            self._bytes -= page[2]
