"""The request book keeps faithful copies, within its bytes."""

from __future__ import annotations

import numpy as np

from mcp_client.flow import fingerprint_of
from mcp_client.prefetch.book import RequestBook
from mcp_client.request import Request


def request(value: float, size: int = 4) -> Request:
    return Request(model="m", inputs={"x": np.full(size, value, np.float32)})


def test_a_request_comes_back_although_the_application_reuses_its_buffer() -> None:
    book = RequestBook(10_000, fingerprint_of)
    asked = request(1.0)
    book.remember("/a", asked, fingerprint_of(asked))
    asked.inputs["x"][:] = 9
    kept = book.get("/a")
    assert kept is not None
    assert kept.inputs["x"].tolist() == [1.0] * 4
    assert not kept.inputs["x"].flags.writeable


def test_inputs_that_changed_before_they_were_copied_are_not_kept() -> None:
    book = RequestBook(10_000, fingerprint_of)
    asked = request(1.0)
    key = fingerprint_of(asked)
    asked.inputs["x"][:] = 9
    book.remember("/a", asked, key)
    assert book.get("/a") is None


def test_the_path_longest_unused_goes_first_and_bytes_stay_within_the_budget() -> None:
    book = RequestBook(3 * (400 + 2), fingerprint_of)
    for n in range(3):
        book.remember(f"/{n}", request(n, 100), fingerprint_of(request(n, 100)))
    book.remember("/0", request(0, 100), fingerprint_of(request(0, 100)))  # used again
    book.remember("/3", request(3, 100), fingerprint_of(request(3, 100)))
    assert [book.get(f"/{n}") is not None for n in range(4)] == [True, False, True, True]
    book.remember("/big", request(0, 10_000), fingerprint_of(request(0, 10_000)))
    assert book.get("/big") is None
    assert book.get("/0") is not None


def test_a_path_holds_the_request_it_had_last() -> None:
    book = RequestBook(10_000, fingerprint_of)
    for value in (1.0, 2.0):
        book.remember("/a", request(value), fingerprint_of(request(value)))
    kept = book.get("/a")
    assert kept is not None
    assert kept.inputs["x"][0] == 2.0
