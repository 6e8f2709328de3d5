"""Exchanges through the user's own ``httpx.Client``, with its proxies, auth and transports; and httpx's errors as ours."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .._httpx import httpx
from ..errors import ConnectionFailedError, DeadlineExceededError, MCPError, ProtocolError
from ..protocols import WireRequest, WireResponse
from .credential import Credential
from .http11 import too_large, unpacked, without


def send(
    client: httpx.Client, url: str, headers: Mapping[str, str], wire: WireRequest, deadline: float, limit: int
) -> WireResponse:
    left = max(0.001, deadline - time.monotonic())
    with (
        _our_errors(url, deadline),
        client.stream(**_arguments(url, headers, wire), timeout=left) as response,
    ):
        chunks: list[bytes] = []
        for chunk in response.iter_raw():
            _add(chunks, chunk, limit)
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"{url} did not answer before the deadline")
        return _response(response, chunks, limit)


async def asend(
    client: httpx.AsyncClient,
    url: str,
    headers: Mapping[str, str],
    wire: WireRequest,
    deadline: float,
    limit: int,
) -> WireResponse:
    """Its caller bounds the time of it all."""
    left = max(0.001, deadline - time.monotonic())
    with _our_errors(url, deadline):
        async with client.stream(**_arguments(url, headers, wire), timeout=left) as response:
            chunks: list[bytes] = []
            async for chunk in response.aiter_raw():
                _add(chunks, chunk, limit)
            return _response(response, chunks, limit)


def _arguments(url: str, headers: Mapping[str, str], wire: WireRequest) -> dict[str, Any]:
    return {
        "method": wire.method,
        "url": url + wire.path,
        "headers": {**without(headers, {name.lower() for name in wire.headers}), **wire.headers},
        "content": b"".join(wire.body) or None,
        "follow_redirects": False,  # they would carry the credentials along
    }


def _add(chunks: list[bytes], chunk: bytes, limit: int) -> None:
    chunks.append(chunk)
    if (size := sum(map(len, chunks))) > limit:
        raise too_large(size, limit)


def _response(response: httpx.Response, chunks: list[bytes], limit: int) -> WireResponse:
    headers = dict(response.headers)
    body = unpacked(b"".join(chunks), headers.get("content-encoding", ""), limit)
    return WireResponse(response.status_code, headers, body)


class _BearerAuth(httpx.Auth):
    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._credential.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401 and self._credential.renew(token):
            request.headers["Authorization"] = f"Bearer {self._credential.token()}"
            yield request


def bearer_auth(credential: Credential | None) -> httpx.Auth | None:
    """The credential for an ``httpx.Client`` (model files are downloaded with one)."""
    return _BearerAuth(credential) if credential is not None else None


@contextmanager
def _our_errors(url: str, deadline: float) -> Iterator[None]:
    try:
        yield
    except MCPError:
        raise
    except httpx.PoolTimeout as error:
        raise DeadlineExceededError(f"no connection to {url} became free in time") from error
    except httpx.TimeoutException as error:
        if time.monotonic() >= deadline - 0.005:
            raise DeadlineExceededError(f"{url} did not answer before the deadline") from error
        silent = ConnectionFailedError(f"{url} did not answer: {_words(error)}")
        silent.nothing_sent = isinstance(error, httpx.ConnectTimeout)
        raise silent from error
    except httpx.NetworkError as error:
        failed = ConnectionFailedError(f"no connection to {url}: {_words(error)}")
        failed.nothing_sent = isinstance(error, httpx.ConnectError)
        raise failed from error
    except httpx.RemoteProtocolError as error:
        if "disconnected" in str(error) or "closed connection" in str(error) or "incomplete" in str(error):
            raise ConnectionFailedError(
                f"{url} closed the connection before its answer was complete: {error}"
            ) from error
        raise ProtocolError(f"{url} does not speak HTTP/1.1 correctly: {error}") from error
    except httpx.HTTPError as error:
        raise ProtocolError(f"the exchange with {url} failed: {_words(error)}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
