"""Which transitions one step behind others is evidence for."""

from __future__ import annotations

from collections.abc import Iterator

from mcp_client.prefetch.profile import SEPARATOR

Step = tuple[str, str]  # path, route


def keys_of(gram: tuple[Step, ...]) -> Iterator[tuple[str, str, str]]:
    """(kind, context, next) of every order, from none (popularity) to all steps before the last."""
    *before, (path, _) = gram
    paths = [one for one, _ in before]
    for order in range(len(paths) + 1):
        yield "path", SEPARATOR.join(paths[len(paths) - order :]), path
