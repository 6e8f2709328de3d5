"""Errors: where they say they happened, and that they survive copying and process pools."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from mcp_client import errors
from mcp_client.errors import MCPError, MissingExtraError, ServerError


def every_error() -> list[MCPError]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MCPError)]
    made: list[MCPError] = []
    for kind in kinds:
        if issubclass(kind, ServerError):
            made.append(kind("no", status=429, code="busy", retry_after_s=2.5))
        elif kind is MissingExtraError:
            made.append(kind("edge", "onnxruntime", "this"))
        else:
            made.append(kind("no"))
    return made


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_an_error_survives_copying_and_another_process(error: MCPError) -> None:
    error.at(request_id="r", endpoint="http://e", attempts=2)
    error.add_note("a note")
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
        assert "request r, endpoint http://e, attempt 2" in str(twin)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.RequestRejectedError),
        (401, errors.AuthenticationError),
        (404, errors.NotFoundError),
        (429, errors.OverloadedError),
        (503, errors.OverloadedError),
        (504, errors.ServerTimeoutError),
        (418, ServerError),
        (500, ServerError),
    ],
)
def test_a_status_has_its_error(status: int, kind: type[ServerError]) -> None:
    assert type(ServerError.of(status, "no")) is kind


def test_names_in_messages_are_never_endless() -> None:
    assert errors.listed([]) == "none"
    assert errors.listed(["a", "b"]) == "'a', 'b'"
    assert errors.listed([str(n) for n in range(1000)]).endswith("and 980 more")
