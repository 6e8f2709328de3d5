"""Routes: path templates whose parameters can be read from a path and put back, and builders that make a path's inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..request import Outputs, Parameter

Params = dict[str, str | int]

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([a-z]+))?\}")
# No leading zeros: a path and its parameters stand for each other both ways.
_KINDS = {"": r"[^/]+", "int": r"0|-?[1-9][0-9]*"}


@dataclass(frozen=True, slots=True)
class Route:
    """A template such as ``/doc/{id}/page/{n:int}`` and the builder of the inputs of any path that fits it.

    ``{name}`` is one segment of text, taken as it is (no percent-decoding); ``{name:int}`` a whole number in decimal.
    """

    template: str
    builder: Callable[..., Any]
    model: str | None = None
    version: str | None = None
    outputs: Outputs | None = None
    parameters: Mapping[str, Parameter] | None = None
    importance: float = 1.0
    pattern: re.Pattern[str] = re.compile("")
    ints: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, builder: Callable[..., Any], **target: Any) -> Route:
        """Read a template; ``ConfigurationError`` says what is wrong with a bad one."""
        if not template.startswith("/"):
            raise ConfigurationError(f"a route starts with '/'; got {template!r}")
        names: list[str] = []
        ints: set[str] = set()
        parts: list[str] = []
        for segment in template.split("/"):
            at = 0
            for field in _FIELD.finditer(segment):
                name, kind = field.group(1), field.group(2) or ""
                if kind not in _KINDS:
                    raise ConfigurationError(
                        f"{template!r}: {{{name}:{kind}}} must be {{{name}}} or {{{name}:int}}"
                    )
                if name in names:
                    raise ConfigurationError(f"{template!r}: {{{name}}} stands in it twice")
                names.append(name)
                if kind == "int":
                    ints.add(name)
                parts += [re.escape(segment[at : field.start()]), f"(?P<{name}>{_KINDS[kind]})"]
                at = field.end()
            rest = segment[at:]
            if "{" in rest or "}" in rest or (at and at != len(segment)) or (at and parts[-2]):
                raise ConfigurationError(
                    f"{template!r}: each segment is plain text or one whole {{name}} or {{name:int}}"
                )
            parts += [re.escape(rest), "/"]
        pattern = re.compile("".join(parts[:-1]))
        importance = target.get("importance", 1.0)
        if not isinstance(importance, (int, float)) or not importance >= 0:
            raise ConfigurationError(f"{template!r}: importance must be a number ≥ 0; got {importance!r}")
        return cls(template=template, builder=builder, pattern=pattern, ints=frozenset(ints), **target)

    def match(self, path: str) -> Params | None:
        """The parameters of a path, or ``None`` if it does not fit."""
        found = self.pattern.fullmatch(path)
        if found is None:
            return None
        return {name: int(text) if name in self.ints else text for name, text in found.groupdict().items()}

    def path_for(self, params: Mapping[str, str | int]) -> str:
        """The path of these parameters: ``match`` the other way round."""
        return _FIELD.sub(lambda field: str(params[field.group(1)]), self.template)

    def build(self, params: Params) -> Any:
        """What the application's builder makes: the inputs of an ``infer``, or ``None`` where there is nothing."""
        return self.builder(**params)

    @property
    def shape(self) -> str:
        """The template without its names: two routes of one shape fit the same paths."""
        return _FIELD.sub(lambda field: "{int}" if field.group(2) else "{}", self.template)


class RouteTable:
    """All routes of a client. Where several fit a path, the one with a plain segment furthest to the left wins."""

    def __init__(self) -> None:
        self._routes: tuple[Route, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._routes)

    def add(self, route: Route) -> None:
        for known in self._routes:
            if known.shape == route.shape:
                raise ConfigurationError(
                    f"{route.template!r} fits the same paths as {known.template!r}, which is a route already"
                )
        self._routes = tuple(sorted((*self._routes, route), key=_rank))

    def resolve(self, path: str) -> tuple[Route, Params] | None:
        """The route that a path fits best, and its parameters there."""
        for route in self._routes:
            params = route.match(path)
            if params is not None:
                return route, params
        return None

    def named(self, template: str) -> Route | None:
        """The route of this template."""
        return next((route for route in self._routes if route.template == template), None)


def _rank(route: Route) -> list[int]:
    kinds = {"{int}": 1, "{}": 2}
    return [kinds.get(segment, 0) for segment in route.shape.split("/")]
