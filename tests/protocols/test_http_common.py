"""Error bodies of every server seen, Retry-After, Cache-Control, and the headers of a request."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client import errors
from mcp_client.protocols import WireResponse
from mcp_client.protocols.http_common import (
    freshness,
    read_context,
    request_headers,
    response_hash,
    retry_after,
    server_error,
)
from mcp_client.request import Request


def error_of(status: int, body: bytes, **headers: str) -> errors.ServerError:
    return server_error(WireResponse(status, {k.replace("_", "-"): v for k, v in headers.items()}, body))


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b'{"error": {"code": "shape_mismatch", "message": "expected"}}', "expected", "shape_mismatch"),
        (b'{"error": "from Triton"}', "from Triton", ""),
        (b'{"error": "text", "code": "c"}', "text", "c"),
        (b'{"detail": "Not Found"}', "Not Found", ""),
        (
            b'{"detail": [{"loc": ["body", "inputs", 0], "msg": "Field required", "type": "missing"}]}',
            "body.inputs.0: Field required",
            "",
        ),
        (b'{"detail": [{"msg": "a"}, "b"]}', "a; b", ""),
        (b'{"message": "m"}', "m", ""),
        (b'{"title": "Problem", "status": 400}', "Problem", ""),
        (b'{"error": {"type": "t", "message": "openai"}}', "openai", "t"),
        (b'"just a string"', "just a string", ""),
        (b"plain text\n", "plain text", ""),
        (
            b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>",
            "502 Bad Gateway",
            "",
        ),
        (b"<p>no <b>title</b></p>", "no title", ""),
        (b"\xff\xfe", "��", ""),
    ],
)
def test_every_kind_of_error_body_is_read(body: bytes, message: str, code: str) -> None:
    error = error_of(400, body)
    assert (error.message, error.code, error.status) == (message, code, 400)


@pytest.mark.parametrize("body", [b"", b"  ", b"{}", b"null", b'{"error": null}', b'{"error": ""}'])
def test_an_error_without_words_still_says_which_status(body: bytes) -> None:
    assert "503 Service Unavailable" in error_of(503, body).message


def test_a_redirect_says_where_to() -> None:
    assert "https://other" in error_of(307, b"", location="https://other").message


def test_an_endless_message_is_cut() -> None:
    assert len(error_of(500, b"x" * 100_000).message) < 1100


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.RequestRejectedError),
        (401, errors.AuthenticationError),
        (403, errors.AuthenticationError),
        (404, errors.NotFoundError),
        (408, errors.ServerTimeoutError),
        (422, errors.RequestRejectedError),
        (429, errors.OverloadedError),
        (500, errors.ServerError),
        (503, errors.OverloadedError),
        (504, errors.ServerTimeoutError),
        (599, errors.ServerError),
    ],
)
def test_each_status_is_its_error(status: int, kind: type[errors.ServerError]) -> None:
    assert type(error_of(status, b"")) is kind


@given(st.binary(max_size=200), st.integers(201, 599), st.sampled_from(["", "text/html", "application/json"]))
def test_any_error_body_gives_an_error_of_ours(body: bytes, status: int, content_type: str) -> None:
    error = error_of(status, body, content_type=content_type)
    assert error.message
    assert error.status == status


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 5 ", 5.0),
        ("1.5", 1.5),
        ("-1", None),
        ("soon", None),
        ("", None),
        ("1" * 50, None),
    ],
)
def test_retry_after_in_seconds(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}, now=0.0) == seconds


def test_retry_after_as_a_date() -> None:
    assert retry_after({"retry-after": formatdate(1090, usegmt=True)}, now=1000.0) == 90.0
    assert retry_after({"retry-after": formatdate(900, usegmt=True)}, now=1000.0) == 0.0


def test_retry_after_as_a_date_goes_by_the_servers_own_clock() -> None:
    headers = {"retry-after": formatdate(1090, usegmt=True), "date": formatdate(1080, usegmt=True)}
    assert retry_after(headers, now=5_000_000.0) == 10.0


def test_an_error_carries_its_retry_after() -> None:
    assert error_of(503, b"", retry_after="7").retry_after_s == 7.0
    date = formatdate(time.time() + 60, usegmt=True)
    assert error_of(429, b"", retry_after=date).retry_after_s == pytest.approx(60, abs=3)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (None, False)),
        ({"cache-control": "private"}, (None, False)),
        ({"cache-control": "max-age=60"}, (60.0, False)),
        ({"cache-control": 'Public, Max-Age="60"'}, (60.0, False)),
        ({"cache-control": "max-age=60", "age": "20"}, (40.0, False)),
        ({"cache-control": "max-age=60", "age": "200"}, (0.0, False)),
        ({"cache-control": "max-age=60, no-store"}, (None, True)),
        ({"cache-control": "no-cache"}, (None, True)),
        ({"cache-control": "max-age=soon"}, (0.0, False)),
        ({"cache-control": "max-age=-5"}, (0.0, False)),
        ({"cache-control": "max-age=60, max-age=5"}, (5.0, False)),
        ({"cache-control": "s-maxage=5"}, (None, False)),
    ],
)
def test_cache_control(headers: dict[str, str], expected: tuple[float | None, bool]) -> None:
    said = freshness(headers)
    assert (said["max_age_s"], said["no_store"]) == expected


@pytest.mark.parametrize(
    ("value", "revalidate", "on_error"),
    [
        ("max-age=60", None, None),
        ("max-age=60, stale-while-revalidate=30, stale-if-error=600", 30.0, 600.0),
        ("stale-if-error=x", None, 0.0),
        ("max-age=60, stale-while-revalidate=30, must-revalidate", 0.0, 0.0),
    ],
)
def test_cache_control_for_stale_answers(
    value: str, revalidate: float | None, on_error: float | None
) -> None:
    said = freshness({"cache-control": value})
    assert (said["stale_while_revalidate_s"], said["stale_if_error_s"]) == (revalidate, on_error)


@given(st.text(), st.text(), st.text(), st.sampled_from(["demand", "prefetch"]))
def test_ids_sessions_and_paths_of_any_text_arrive(id: str, session: str, path: str, purpose: str) -> None:
    def clean(text: str) -> str:  # no header can carry half a surrogate pair
        return text.encode("utf-8", "ignore").decode()

    request = Request("m", {}, id=clean(id), session=clean(session), path=clean(path), purpose=purpose)  # type: ignore[arg-type]
    headers = request_headers(request)
    assert all(value.isascii() and value.isprintable() and " " not in value for value in headers.values())
    context = read_context({name.lower(): value for name, value in headers.items()})
    assert (context.request_id, context.session, context.path, context.purpose) == (
        clean(id),
        clean(session),
        clean(path),
        purpose,
    )


def test_an_ordinary_path_travels_as_it_is() -> None:
    assert (
        request_headers(Request("m", {}, path="/doc/7/page/2?x=1&y=[2]"))["X-MCP-Path"]
        == "/doc/7/page/2?x=1&y=[2]"
    )


def test_the_response_hash_covers_body_content_type_and_model() -> None:
    base = response_hash([b"ab", b"c"], content_type="application/json", model_id="m")
    assert base == response_hash([b"abc"], content_type="application/json", model_id="m")
    assert base != response_hash([b"abd"], content_type="application/json", model_id="m")
    assert base != response_hash([b"abc"], content_type="text/plain", model_id="m")
    assert base != response_hash([b"abc"], content_type="application/json", model_id="n")
