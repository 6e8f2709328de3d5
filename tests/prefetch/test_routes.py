"""Routes: a template and its parameters stand for a path both ways."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client import ConfigurationError
from mcp_client.prefetch.routes import Route, RouteTable


def route(template: str) -> Route:
    return Route.of(template, lambda **params: params)


@pytest.mark.parametrize(
    ("template", "path", "params"),
    [
        ("/doc/{id}/page/{n:int}", "/doc/7/page/12", {"id": "7", "n": 12}),
        ("/doc/{id}/page/{n:int}", "/doc/a%20b/page/-3", {"id": "a%20b", "n": -3}),
        ("/{x}", "/é", {"x": "é"}),
        ("/", "/", {}),
        ("/a.b+c/{x}", "/a.b+c/1", {"x": "1"}),
        ("/n/{n:int}", "/n/0", {"n": 0}),
    ],
)
def test_a_path_that_fits_gives_its_parameters(template: str, path: str, params: dict[str, object]) -> None:
    assert route(template).match(path) == params
    assert route(template).path_for(params) == path  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path",
    [
        "/doc/7/page/",
        "/doc//page/1",
        "/doc/7/page/x",
        "/doc/7/page/01",
        "/doc/7/page/-0",
        "/doc/7/8/page/1",
        "/doc/7/page/1/",
        "doc/7/page/1",
        "/doc/7/page/1\n",
        "/doc/7/page/١",
    ],
)
def test_a_path_that_does_not_fit_gives_nothing(path: str) -> None:
    assert route("/doc/{id}/page/{n:int}").match(path) is None


@given(
    st.text(st.characters(exclude_characters="/\x1f|", exclude_categories=["Cs"]), min_size=1), st.integers()
)
def test_parameters_come_back_from_the_path_they_make(text: str, number: int) -> None:
    one = route("/doc/{id}/page/{n:int}")
    assert one.match(one.path_for({"id": text, "n": number})) == {"id": text, "n": number}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("doc/{id}", "starts with '/'"),
        ("/{n:float}", "{n} or {n:int}"),
        ("/{a}/{a}", "twice"),
        ("/{a}-{b}", "one whole"),
        ("/x{a}", "one whole"),
        ("/{a}x", "one whole"),
        ("/{", "one whole"),
        ("/{1a}", "one whole"),
        ("/a}", "one whole"),
    ],
)
def test_a_bad_template_is_refused_when_it_is_registered(template: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        route(template)


def test_the_most_specific_route_wins_whatever_the_order() -> None:
    templates = ["/doc/{id}", "/doc/latest", "/{kind}/latest", "/doc/{n:int}"]
    for order in (templates, templates[::-1]):
        table = RouteTable()
        for template in order:
            table.add(route(template))
        resolved = {
            path: table.resolve(path) for path in ("/doc/latest", "/doc/7", "/doc/x", "/img/latest", "/img/7")
        }
        assert {path: found and found[0].template for path, found in resolved.items()} == {
            "/doc/latest": "/doc/latest",
            "/doc/7": "/doc/{n:int}",
            "/doc/x": "/doc/{id}",
            "/img/latest": "/{kind}/latest",
            "/img/7": None,
        }


def test_two_routes_for_the_same_paths_are_refused() -> None:
    table = RouteTable()
    table.add(route("/doc/{id}"))
    with pytest.raises(ConfigurationError, match=re.escape("the same paths as '/doc/{id}'")):
        table.add(route("/doc/{name}"))
